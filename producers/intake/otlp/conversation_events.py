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
SILENT = ("no_content", "no_spans")
"""codes of what says nothing by itself"""
CAPTURED = "captured"
"""code of a conversation that the gateway has in the log"""


@dataclass(frozen=True, slots=True)
class Emitted:
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

    events: list[Emitted] = field(default_factory=list)
    root: EvaluationTarget | None = None
    replies: dict[str, EvaluationTarget] = field(default_factory=dict)
    spoken: dict[Where, EvaluationTarget] = field(default_factory=dict)
    steps: Counter[str] = field(default_factory=Counter)
    when: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(slots=True)
class _One:
    """A part that is an episode."""

    part: AgentSpans
    told: SpanConversation
    episode: Episode
    passed: Counter[str]


def made(
    tenant: str,
    policy: str,
    found: Sequence[Span],
    captured: Collection[str],
    beside: Sequence[SpanEvent],
    passed: Counter[str],
) -> ConversationEvents:
    """The events of one conversation. captured: replies that are in the log already; beside: evaluations that name one
    of its replies; passed: counts what has no place. Raises BadRow where nothing of it can be an episode."""
    matter = [span for span in found if matters(span)]
    spans = sorted((span for span in matter if not span.log), key=lambda span: (span.start or 0, span.trace, span.id))
    if not spans:
        raise BadRow("no_spans", "its log records belong to no span")
    first = made_id(OTLP.label, tenant, policy, spans[0].trace, spans[0].id)
    told = _told(parts(found), captured, beside) or [(0, _read(AgentSpans(None, spans=matter), captured, beside))]
    out = ConversationEvents()
    kins: dict[int, Kin] = {}
    events: list[list[Emitted]] = []
    for number, one in told:
        part = one.part
        id = first if part.agent is None else made_id(OTLP.label, first, "agent", *part.agent)
        parent = None if part.parent is None else kins[part.parent].id
        kins[number] = Kin(id, first, first, first, parent, part.spawn_call)
        events.append(_emitted(out, tenant, kins[number], one))
        passed += one.passed
    root, *others = events
    out.events = [*root[:-1], *(event for each in others for event in each), root[-1]]
    return out


def _told(found: list[AgentSpans], captured: Collection[str], beside: Sequence[SpanEvent]) -> list[tuple[int, _One]]:
    """The parts that are episodes, by number; none where sub-agents are and the conversation itself is not."""
    out: dict[int, _One] = {}
    for number in range(len(found) - 1, -1, -1):
        part = found[number]
        try:
            out[number] = _read(part, captured, beside)
            continue
        except BadRow as error:
            if error.code not in (*SILENT, CAPTURED) or (part.parent is None and not out):
                raise
            silent = error.code != CAPTURED
        if part.parent is None:
            return []
        if silent:
            found[part.parent].spans += part.spans
        for other in found:
            if other.parent == number:
                other.parent, other.spawn_call = part.parent, other.spawn_call or part.spawn_call
    return sorted(out.items())


def _read(part: AgentSpans, captured: Collection[str], beside: Sequence[SpanEvent]) -> _One:
    """A part as an episode. Raises BadRow where nothing was said in it, or all that was is in the log already."""
    own = {text_of(span.attributes, RESPONSE) for span in part.spans}
    named = [said for said in beside if text_of(said.attributes, RESPONSE) in own]
    counts: Counter[str] = Counter()
    told = SpanConversation([span for span in part.spans if matters(span)], counts, captured.__contains__, named)
    try:
        return _One(part, told, told.episode(), counts)
    except BadRow as error:
        if error.code in SILENT and told.captured:
            raise BadRow(CAPTURED, "every call of it is in the log already") from None
        raise


def _emitted(out: ConversationEvents, tenant: str, kin: Kin, one: _One) -> list[Emitted]:
    """The events of a trajectory; notes in `out` what a late evaluation may judge."""
    trace = one.episode.trace
    made_of = Bodies(OTLP, kin.id, one.episode)
    events = [Emitted(tenant, kin, trace, step, draft) for step, draft in enumerate(made_of.drafts())]
    targets = [EvaluationTarget(kin, trace, reply) for reply in made_of.replies]
    out.root = out.root or EvaluationTarget(kin, trace)
    out.replies |= {name: targets[number] for name, number in one.told.replies.items()}
    out.spoken |= {where: targets[number] for where, number in one.told.spoken.items()}
    out.steps[kin.id] = len(events)
    for span in one.part.spans:
        if (id := text_of(span.attributes, RESPONSE)) in one.told.replies:
            out.when[id] = when_of(span)
    return events


def when_of(span: Span) -> tuple[int, int]:
    """From when to when it lasted; for ever where nobody knows."""
    return span.start or 0, span.end or bounds.TIME


def late(tenant: str, target: EvaluationTarget, step: int, judged: ClaimedReward, digest: str) -> Emitted:
    """An evaluation of something that is over, as the event at `step` of its trajectory."""
    at = judged.at or 0
    id = made_id(OTLP.label, target.kin.id, "late", digest)
    body = reward(OTLP, target.kin.id, id, target.reply, judged, at)
    return Emitted(tenant, target.kin, target.trace, step, BareEvent("reward", body, "evaluator", at))
