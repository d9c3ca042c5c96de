"""Which spans of a conversation are whose: an agent that another agent invoked has a trajectory of its own. Pure.

Invariants: every span is in exactly one part, whatever parents are claimed, circles included; parts follow from the
spans alone, not from their order; the first part is the conversation itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from millrace.formats.episodes.rows import text_of
from millrace.formats.spans.conversation import Where
from millrace.formats.spans.genai import operation
from millrace.formats.spans.otlp_json import Span

INVOKE_AGENT = "invoke_agent"


@dataclass(slots=True)
class AgentSpans:
    """The spans of one agent. agent: its own span, None for the conversation; parent: number of the part that invoked
    it; spawn_call: the tool call that did, where one is known."""

    agent: Where | None
    parent: int | None = None
    spawn_call: str | None = None
    spans: list[Span] = field(default_factory=list)


def parts(spans: Sequence[Span]) -> list[AgentSpans]:
    """The conversation and its sub-agents, each behind the one that invoked it."""
    spans_by_id = {(span.trace, span.id): span for span in spans if not span.log}
    enclosing = {
        where: _above(spans_by_id, where) for where, span in spans_by_id.items() if operation(span) == INVOKE_AGENT
    }
    sub_agents = {where for where, (above, _) in enclosing.items() if above is not None}
    out = [AgentSpans(None)]
    numbers: dict[Where, int] = {}
    rest = sorted(sub_agents, key=lambda where: (spans_by_id[where].start or 0, where))
    while rest:
        # Circles of agents that invoke each other have no first one: whoever is left is the conversation's own.
        next_agents = [where for where in rest if _owner(enclosing[where][0], sub_agents) in (None, *numbers)]
        if not next_agents:
            break
        for where in next_agents:
            above, call = enclosing[where]
            parent = numbers.get(above, 0) if above is not None else 0
            numbers[where] = len(out)
            out.append(AgentSpans(where, parent, call))
        rest = [where for where in rest if where not in numbers]
    for span in spans:
        out[_part_of(spans_by_id, numbers, span)].spans.append(span)
    return out


def _owner(above: Where | None, sub_agents: set[Where]) -> Where | None:
    return above if above in sub_agents else None


def _above(spans_by_id: Mapping[Where, Span], where: Where) -> tuple[Where | None, str | None]:
    """(the nearest agent above a span, the tool call on the way there)."""
    call: str | None = None
    trail = {where}
    at = spans_by_id[where]
    while (up := (at.trace, at.parent)) in spans_by_id and up not in trail:
        trail.add(up)
        at = spans_by_id[up]
        if operation(at) == INVOKE_AGENT:
            return up, call
        if call is None and operation(at) == "execute_tool":
            call = text_of(at.attributes, "gen_ai.tool.call.id") or None
    return None, None


def _part_of(spans_by_id: Mapping[Where, Span], numbers: Mapping[Where, int], span: Span) -> int:
    at: Where | None = (span.trace, span.id)
    trail: set[Where] = set()
    while at is not None and at in spans_by_id and at not in trail:
        if at in numbers:
            return numbers[at]
        trail.add(at)
        at = (at[0], spans_by_id[at].parent)
    return 0
