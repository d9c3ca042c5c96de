"""A conversation as events, before they have a place in a log. Pure.

Invariants: ids follow from the trace and span ids alone; the events of a sub-agent stand between the beginning and the
end of the conversation that invoked it, and are of its root, group and attempt; a sub-agent of which nothing was said
is a part of the one that invoked it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from millrace.formats.episodes.episode import ClaimedReward, Episode
from millrace.formats.episodes.event_bodies import BareEvent, Bodies, Origin, reward
from millrace.formats.episodes.rows import BadRow, text_of
from millrace.formats.episodes.sealer import Kin
from millrace.formats.spans.conversation import SpanConversation, Where
from millrace.formats.spans.genai import RESPONSE, matters
from millrace.formats.spans.otlp_json import Span, SpanEvent
from millrace.infra.stages.letters import made_id
from millrace.producers.intake.otlp.agents import AgentSpans, parts
from millrace.schemas import bounds

OTLP = Origin("otlp", "observed", "otlp")
"""spans: somebody else's client saw the text, nobody here the tokens"""
SILENCE_CODES = ("no_content", "no_spans")
"""codes of what says nothing by itself"""
IN_LOG = "captured"
"""code of a conversation that the gateway has in the log"""


@dataclass(frozen=True, slots=True)
class EmittedEvent:
    """An event without its numbers in the log. step: its place in its trajectory."""

    tenant: str
    kin: Kin
    trace: str | None
    step: int
    draft: BareEvent

    @property
    def id(self) -> str:
        """Follows from the trajectory and the step."""
        return made_id(OTLP.label, self.kin.id, "event", self.step)


@dataclass(slots=True)
class EvaluationTarget:
    """What a late evaluation may judge: a trajectory, or a reply of it."""

    kin: Kin
    trace: str | None
    reply: str | None = None


@dataclass(slots=True)
class ConversationEvents:
    """The events of a conversation. replies: what a provider's id of a reply stands for; spoken: what a span does;
    steps: how many events each trajectory has; when: between which times a reply was made."""

    events: list[EmittedEvent] = field(default_factory=list)
    root: EvaluationTarget | None = None
    replies: dict[str, EvaluationTarget] = field(default_factory=dict)
    spoken: dict[Where, EvaluationTarget] = field(default_factory=dict)
    steps: Counter[str] = field(default_factory=Counter)
    when: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(slots=True)
class _One:
    """A part that is an episode."""

    part: AgentSpans
    conversation: SpanConversation
    episode: Episode
    counts: Counter[str]


def make_events(
    tenant: str,
    policy: str,
    all_spans: Sequence[Span],
    known_ids: Collection[str],
    beside: Sequence[SpanEvent],
    omissions: Counter[str],
) -> ConversationEvents:
    """The events of one conversation. known_ids: replies that are in the log already; beside: evaluations that name one
    of its replies; omissions: counts what has no place. Raises BadRow where nothing of it can be an episode."""
    matter = [span for span in all_spans if matters(span)]
    spans = sorted((span for span in matter if not span.log), key=lambda span: (span.start or 0, span.trace, span.id))
    if not spans:
        raise BadRow("no_spans", "its log records belong to no span")
    first = made_id(OTLP.label, tenant, policy, spans[0].trace, spans[0].id)
    episodes = _episodes_of(parts(all_spans), known_ids, beside) or [
        (0, _read(AgentSpans(None, spans=matter), known_ids, beside))
    ]
    out = ConversationEvents()
    kins: dict[int, Kin] = {}
    events: list[list[EmittedEvent]] = []
    for number, one in episodes:
        part = one.part
        id = first if part.agent is None else made_id(OTLP.label, first, "agent", *part.agent)
        parent = None if part.parent is None else kins[part.parent].id
        kins[number] = Kin(id, first, first, first, parent, part.spawn_call)
        events.append(_emit(out, tenant, kins[number], one))
        omissions += one.counts
    root, *children = events
    out.events = [*root[:-1], *(event for child in children for event in child), root[-1]]
    return out


def _episodes_of(
    all_parts: list[AgentSpans], known_ids: Collection[str], beside: Sequence[SpanEvent]
) -> list[tuple[int, _One]]:
    """The parts that are episodes, by number; none where sub-agents are and the conversation itself is not."""
    out: dict[int, _One] = {}
    for number in range(len(all_parts) - 1, -1, -1):
        part = all_parts[number]
        try:
            out[number] = _read(part, known_ids, beside)
            continue
        except BadRow as error:
            if error.code not in (*SILENCE_CODES, IN_LOG) or (part.parent is None and not out):
                raise
            is_silent = error.code != IN_LOG
        if part.parent is None:
            return []
        if is_silent:
            all_parts[part.parent].spans += part.spans
        for child in all_parts:
            if child.parent == number:
                child.parent, child.spawn_call = part.parent, child.spawn_call or part.spawn_call
    return sorted(out.items())


def _read(part: AgentSpans, known_ids: Collection[str], beside: Sequence[SpanEvent]) -> _One:
    """A part as an episode. Raises BadRow where nothing was said in it, or all that was is in the log already."""
    ids = {text_of(span.attributes, RESPONSE) for span in part.spans}
    evaluations = [evaluation for evaluation in beside if text_of(evaluation.attributes, RESPONSE) in ids]
    counts: Counter[str] = Counter()
    conversation = SpanConversation(
        [span for span in part.spans if matters(span)], counts, known_ids.__contains__, evaluations
    )
    try:
        return _One(part, conversation, conversation.episode(), counts)
    except BadRow as error:
        if error.code in SILENCE_CODES and conversation.captured:
            raise BadRow(IN_LOG, "every call of it is in the log already") from None
        raise


def _emit(out: ConversationEvents, tenant: str, kin: Kin, one: _One) -> list[EmittedEvent]:
    """The events of a trajectory; notes in `out` what a late evaluation may judge."""
    trace = one.episode.trace
    made_of = Bodies(OTLP, kin.id, one.episode)
    events = [EmittedEvent(tenant, kin, trace, step, draft) for step, draft in enumerate(made_of.drafts())]
    targets = [EvaluationTarget(kin, trace, reply) for reply in made_of.replies]
    out.root = out.root or EvaluationTarget(kin, trace)
    out.replies |= {name: targets[number] for name, number in one.conversation.replies.items()}
    out.spoken |= {where: targets[number] for where, number in one.conversation.spoken.items()}
    out.steps[kin.id] = len(events)
    for span in one.part.spans:
        if (id := text_of(span.attributes, RESPONSE)) in one.conversation.replies:
            out.when[id] = when_of(span)
    return events


def when_of(span: Span) -> tuple[int, int]:
    """From when to when it lasted; for ever where nobody knows."""
    return span.start or 0, span.end or bounds.TIME


def late_evaluation(
    tenant: str, target: EvaluationTarget, step: int, claim: ClaimedReward, digest: str
) -> EmittedEvent:
    """An evaluation of something that is over, as the event at `step` of its trajectory."""
    at = claim.at or 0
    id = made_id(OTLP.label, target.kin.id, "late", digest)
    body = reward(OTLP, target.kin.id, id, target.reply, claim, at)
    return EmittedEvent(tenant, target.kin, target.trace, step, BareEvent("reward", body, "evaluator", at))
