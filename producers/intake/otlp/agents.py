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

INVOKED = "invoke_agent"


@dataclass(slots=True)
class AgentSpans:
    """The spans of one agent. agent: its own span, None for the conversation; parent: number of the part that invoked
    it; spawn_call: the tool call that did, where one is known."""

    agent: Where | None
    parent: int | None = None
    spawn_call: str | None = None
    spans: list[Span] = field(default_factory=list)


def parts(found: Sequence[Span]) -> list[AgentSpans]:
    """The conversation and its sub-agents, each behind the one that invoked it."""
    known = {(span.trace, span.id): span for span in found if not span.log}
    enclosing = {where: _above(known, where) for where, span in known.items() if operation(span) == INVOKED}
    nested = {where for where, (above, _) in enclosing.items() if above is not None}
    out = [AgentSpans(None)]
    numbers: dict[Where, int] = {}
    left = sorted(nested, key=lambda where: (known[where].start or 0, where))
    while left:
        # Circles of agents that invoke each other have no first one: whoever is left is the conversation's own.
        ready = [where for where in left if _owner(enclosing[where][0], nested) in (None, *numbers)]
        if not ready:
            break
        for where in ready:
            above, call = enclosing[where]
            parent = numbers.get(above, 0) if above is not None else 0
            numbers[where] = len(out)
            out.append(AgentSpans(where, parent, call))
        left = [where for where in left if where not in numbers]
    for span in found:
        out[_part_of(known, numbers, span)].spans.append(span)
    return out


def _owner(above: Where | None, nested: set[Where]) -> Where | None:
    return above if above in nested else None


def _above(known: Mapping[Where, Span], where: Where) -> tuple[Where | None, str | None]:
    """(the nearest agent above a span, the tool call on the way there)."""
    call: str | None = None
    seen = {where}
    at = known[where]
    while (up := (at.trace, at.parent)) in known and up not in seen:
        seen.add(up)
        at = known[up]
        if operation(at) == INVOKED:
            return up, call
        if call is None and operation(at) == "execute_tool":
            call = text_of(at.attributes, "gen_ai.tool.call.id") or None
    return None, None


def _part_of(known: Mapping[Where, Span], numbers: Mapping[Where, int], span: Span) -> int:
    at: Where | None = (span.trace, span.id)
    seen: set[Where] = set()
    while at is not None and at in known and at not in seen:
        if at in numbers:
            return numbers[at]
        seen.add(at)
        at = (at[0], known[at].parent)
    return 0
