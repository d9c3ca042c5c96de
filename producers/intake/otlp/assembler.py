"""Records in, events out: which spans belong together, what was seen before, what a late evaluation judges. Pure.

A conversation is all traces that name it, else one trace. It is over when nothing of it came for `silence`, when its
first span came `LONGEST` ago, or when it holds too much. What comes after that is a further episode of the same
conversation, and an evaluation that comes after it is one more reward of what it judges.

Invariants: the same records in the same order make the same events; before a conversation is over neither the order of
its spans, nor how they were batched, nor how often they were sent makes any difference; a span is in at most one
episode; what is remembered has a bound in time, told by the records' own clock."""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from millrace.formats.episodes.rows import BadRow, json_text, text_of
from millrace.formats.spans.conversation import claimed_reward
from millrace.formats.spans.genai import EVALUATION, RESPONSE, conversation_name, matters
from millrace.formats.spans.otlp_json import Span, SpanEvent, size_of
from millrace.producers.intake.otlp.conversation_events import (
    IN_LOG,
    ConversationEvents,
    EmittedEvent,
    EvaluationTarget,
    late_evaluation,
    make_events,
    when_of,
)
from millrace.producers.intake.otlp.records import ClosedConversation, Took
from millrace.schemas.ids import Micros

SECOND = 1_000_000
LONGEST = 3600 * SECOND
"""micros after which a conversation is over though more of it comes, and an evaluation of nothing known is dropped"""
MEMORY = 3600 * SECOND
"""micros for which a conversation that is over is known: its spans are not taken again, its replies can be judged"""
LARGEST = 16 << 20
"""bytes of spans from which on a conversation is over"""
SPAN_BYTES = 200
"""what a span weighs beside its content"""

Name = tuple[str, str]
"""a tenant and a trace of it, or a tenant and the provider's id of a reply"""


@dataclass(slots=True)
class _Trace:
    """A trace that is not over. since: number of the entry that holds the first of it."""

    began: Micros
    newest: Micros
    since: int
    names: set[str] = field(default_factory=set)
    spans: dict[str, Span] = field(default_factory=dict)
    size: int = 0


@dataclass(slots=True)
class _Waiting:
    """Evaluations of a reply that nobody has told of yet, by digest."""

    began: Micros
    since: int
    evaluations: dict[str, SpanEvent] = field(default_factory=dict)


@dataclass(slots=True)
class _Over:
    """What is remembered of a conversation: the spans of its traces, and what a late evaluation may judge."""

    at: Micros
    span_ids: set[str]
    events: ConversationEvents
    names: set[str]


class Assembler:
    """`passed` counts what has no place in an episode, by kind. quiet: micros."""

    def __init__(self, policy: str, silence: Micros) -> None:
        self.policy = policy
        self.silence = silence
        self.passed: Counter[str] = Counter()
        self._now: Micros = 0
        self._open: dict[Name, _Trace] = {}
        self._waiting: OrderedDict[Name, _Waiting] = OrderedDict()
        self._over: OrderedDict[Name, _Over] = OrderedDict()
        self._replies: dict[Name, Name] = {}
        """a trace of the conversation that has a reply"""
        self._judged: OrderedDict[str, Micros] = OrderedDict()
        """digests of evaluations that were taken apart from their trace"""
        self._steps: OrderedDict[str, tuple[int, Micros]] = OrderedDict()
        """how many events a trajectory has"""

    # ------------------------------------------------------------------ what is there

    @property
    def open(self) -> int:
        """Traces that are not over."""
        return len(self._open)

    @property
    def trajectories(self) -> Collection[str]:
        """Those that may go on."""
        return self._steps.keys()

    @property
    def since(self) -> int | None:
        """Number of the first entry that is still needed; None where none is."""
        entries = [one.since for one in self._open.values()] + [one.since for one in self._waiting.values()]
        return min(entries, default=None)

    def all_over(self, now: Micros) -> list[ClosedConversation]:
        """The conversations that are over now, none of whose replies the gateway captured."""
        return [
            conversation
            for conversation, newest, began, size in self._groups(now)
            if self._is_due(now, newest, began, size)
        ]

    def all_open(self, now: Micros) -> list[ClosedConversation]:
        """Every conversation, as if all were over."""
        return [conversation for conversation, *_ in self._groups(now)]

    def replies_of(self, conversation: ClosedConversation) -> set[str]:
        """The provider's ids of the replies in these traces."""
        traces = (self._open[conversation.tenant, trace] for trace in conversation.traces)
        ids = {text_of(span.attributes, RESPONSE) for trace in traces for span in trace.spans.values()}
        return ids - {""}

    def _is_due(self, now: Micros, newest: Micros, began: Micros, size: int) -> bool:
        return newest + self.silence <= now or began + LONGEST <= now or size >= LARGEST

    def _groups(self, now: Micros) -> Iterator[tuple[ClosedConversation, Micros, Micros, int]]:
        groups: dict[tuple[str, str, bool], list[str]] = {}
        for (tenant, trace), one in self._open.items():
            name = min(one.names) if one.names else trace
            groups.setdefault((tenant, name, bool(one.names)), []).append(trace)
        for (tenant, _, _), traces in groups.items():
            members = [self._open[tenant, trace] for trace in traces]
            conversation = ClosedConversation(tenant, now, sorted(traces), min(one.since for one in members), [])
            yield (
                conversation,
                max(one.newest for one in members),
                min(one.began for one in members),
                sum(one.size for one in members),
            )

    # ------------------------------------------------------------------ the fold

    def took(self, record: Took, number: int) -> list[EmittedEvent]:
        """Spans came, in entry `number`. Gives the rewards of what is over already."""
        self._tick(record.at)
        out: list[EmittedEvent] = []
        for span in record.spans:
            if span.log and span.name == EVALUATION:
                out += self._evaluate(record.tenant, span, number)
            elif span.trace:
                self._add(record.tenant, span, number)
            else:
                self.passed["span without a trace"] += 1
        return out

    def close(self, record: ClosedConversation) -> list[EmittedEvent]:
        """A conversation is over: its events. Traces that are not open are passed over."""
        self._tick(record.at)
        traces = {trace: one for trace in record.traces if (one := self._open.pop((record.tenant, trace), None))}
        spans = [span for one in traces.values() for span in one.spans.values()]
        result = self._make_events(record, spans)
        names = {name for one in traces.values() for name in one.names}
        for trace, one in traces.items():
            key = (record.tenant, trace)
            before = self._over.pop(key, None)
            span_ids = (before.span_ids if before else set()) | set(one.spans)
            self._over[key] = _Over(self._now, span_ids, _join(before, result), names)
            for reply in result.replies:
                self._replies[record.tenant, reply] = key
        return result.events

    def forget(self, record: ClosedConversation) -> None:
        """A conversation is over, and the first of it is no longer known: nothing of it is taken again."""
        self._tick(record.at)
        for trace in record.traces:
            one = self._open.pop((record.tenant, trace), None)
            if one is not None:
                self._over[record.tenant, trace] = _Over(self._now, set(one.spans), ConversationEvents(), one.names)

    def _make_events(self, record: ClosedConversation, spans: Sequence[Span]) -> ConversationEvents:
        if not any(matters(span) for span in spans):
            return ConversationEvents()
        ids = {text_of(span.attributes, RESPONSE) for span in spans} - {""}
        keys = [(record.tenant, id) for id in ids if (record.tenant, id) in self._waiting]
        beside = [evaluation for key in keys for evaluation in self._waiting[key].evaluations.values()]
        repeats = {text_of(span.attributes, RESPONSE) for span in spans if self._is_again(record.tenant, span)}
        try:
            result = make_events(record.tenant, self.policy, spans, {*record.captured, *repeats}, beside, self.passed)
        except BadRow as error:
            reason = "conversation in the log already" if error.code == IN_LOG else f"conversation: {error.code}"
            self.passed[reason] += 1
            return ConversationEvents()
        for key in keys:
            self._judged |= dict.fromkeys(self._waiting.pop(key).evaluations, self._now)
        for trajectory, steps in result.steps.items():
            self._steps[trajectory] = steps, self._now
        return result

    def _is_again(self, tenant: str, span: Span) -> bool:
        """Whether it tells of a call that another conversation told of: some servers give one id to many calls, so it
        must have been at the same time."""
        id = text_of(span.attributes, RESPONSE)
        key = self._replies.get((tenant, id)) if id else None
        if key is None:
            return False
        (first_start, first_end), (start, end) = self._over[key].events.when[id], when_of(span)
        return start <= first_end and first_start <= end

    def _add(self, tenant: str, span: Span, number: int) -> None:
        key, id = (tenant, span.trace), _identity(span)
        over = self._over.get(key)
        if over is not None and id in over.span_ids:
            self.passed["span that came again"] += 1
            return
        one = self._open.get(key)
        if one is None:
            one = self._open[key] = _Trace(self._now, self._now, number, set(over.names) if over else set())
        former = one.spans.get(id)
        if former is not None:
            self.passed["span that came again"] += 1
            if _rank(former) >= _rank(span):
                return
        if not matters(span):
            self.passed["other span"] += former is None
        if name := conversation_name(span):
            one.names.add(name)
        one.spans[id] = span
        one.newest = self._now
        one.size += size_of(span) + SPAN_BYTES

    def _evaluate(self, tenant: str, span: Span, number: int) -> list[EmittedEvent]:
        """An evaluation: of a reply by name, else of a span or a trace."""
        (evaluation,) = span.events
        digest = _identity(span)
        if digest in self._judged:
            self.passed["span that came again"] += 1
            return []
        reply = text_of(evaluation.attributes, RESPONSE)
        if reply:
            key = self._replies.get((tenant, reply))
            target = self._over[key].events.replies.get(reply) if key else None
            if target is None:
                waiting = self._waiting.setdefault((tenant, reply), _Waiting(self._now, number))
                waiting.evaluations[digest] = evaluation
                return []
            return self._reward(tenant, target, evaluation, digest)
        key = (tenant, span.trace)
        over = self._over.get(key)
        if over is None or digest in over.span_ids:
            self._add(tenant, span, number)
            return []
        target = over.events.spoken.get((span.trace, span.id), None if key in self._open else over.events.root)
        if target is None:
            self._add(tenant, span, number)
            return []
        return self._reward(tenant, target, evaluation, digest)

    def _reward(self, tenant: str, target: EvaluationTarget, evaluation: SpanEvent, digest: str) -> list[EmittedEvent]:
        claim = claimed_reward(evaluation, None)
        if claim is None or target.kin.id not in self._steps:
            self.passed["evaluation without a score" if claim is None else "evaluation of an unknown reply"] += 1
            return []
        self._judged[digest] = self._now
        step, at = self._steps[target.kin.id]
        self._steps[target.kin.id] = step + 1, at
        return [late_evaluation(tenant, target, step, claim, digest)]

    def _tick(self, at: Micros) -> None:
        """Time goes on: what is too old is forgotten."""
        self._now = max(self._now, at)
        while self._over and next(iter(self._over.values())).at + MEMORY < self._now:
            key, over = self._over.popitem(last=False)
            for reply in over.events.replies:
                if self._replies.get((key[0], reply)) == key:
                    del self._replies[key[0], reply]
        while self._judged and next(iter(self._judged.values())) + MEMORY < self._now:
            self._judged.popitem(last=False)
        while self._steps and next(iter(self._steps.values()))[1] + 2 * MEMORY < self._now:
            self._steps.popitem(last=False)
        while self._waiting and next(iter(self._waiting.values())).began + LONGEST < self._now:
            _, waiting = self._waiting.popitem(last=False)
            self.passed["evaluation of an unknown reply"] += len(waiting.evaluations)


def _identity(span: Span) -> str:
    """What makes a span the same when it comes again: its id; of a log record, which has none, all that it says."""
    if not span.log:
        return span.id
    event = span.events[0]
    text = json_text([span.trace, span.id, span.name, event.at, event.attributes])
    return f"log {hashlib.sha256(text.encode()).hexdigest()}"


def _rank(span: Span) -> tuple[int, str]:
    """Of two spans with one id the one that ended later, or says more, is taken, whichever came first."""
    events = [[one.name, one.at, one.attributes] for one in span.events]
    text = json_text([span.name, span.parent, span.start, span.has_failed, span.attributes, events])
    return span.end or 0, f"{len(text):012d}{text}"


def _join(before: _Over | None, result: ConversationEvents) -> ConversationEvents:
    """What of two episodes of one trace a late evaluation may judge."""
    if before is None:
        return result
    root = result.root or before.events.root
    replies, targets = before.events.replies | result.replies, before.events.spoken | result.spoken
    return ConversationEvents([], root, replies, targets, when=before.events.when | result.when)
