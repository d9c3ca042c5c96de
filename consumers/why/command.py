"""`millrace why ID`."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from typing import NamedTuple

from rich.console import RenderableType

from millrace.consumers.why.find import find
from millrace.consumers.why.read import PolicyTopics
from millrace.consumers.why.render import render
from millrace.consumers.why.story import tell
from millrace.infra.config import Settings
from millrace.infra.connect import claims, history
from millrace.infra.log.base import Bus
from millrace.infra.log.history.rows import Resolve, as_stored
from millrace.infra.terminal import Terminal, clean

WIDTH = 160
MOST_TICKETS = 5
"""tickets of one prompt that are told"""


class WhyAnswer(NamedTuple):
    """What became of something, as text for a terminal; `known`: whether anything is known of it."""

    text: str
    known: bool


def explain(settings: Settings, wanted: str, *, text: bool = False) -> WhyAnswer:
    """What became of an event, reply, call, session, group, ticket, prompt or reward. `text`: with what was said.

    Raises BusError when the log cannot be read."""
    with history(settings) as bus:
        resolve = claims(settings).resolve
        return explain_in(bus, settings.namespace, settings.policy.name, wanted, resolve, text=text)


def explain_in(
    bus: Bus,
    namespace: str,
    policy: str,
    wanted: str,
    resolve: Resolve = as_stored,
    *,
    text: bool = False,
    colour: bool = False,
) -> WhyAnswer:
    """The same for any bus. `resolve` reads claims of large records."""
    topics = PolicyTopics(bus, namespace, policy, resolve)
    wanted = wanted.strip()
    subject = find(topics, wanted) if wanted else None
    if subject is None:
        if wanted and (others := sorted(topics.others(wanted))):
            return _unknown(
                f"{wanted!r} is of policy {' and '.join(others)}, not of {policy}: "
                f"ask `millrace --set policy.name={others[0]} why {wanted}`."
            )
        return _unknown(
            f"Nothing is known of {wanted!r} in {namespace}: no event, reply, call, session, group, ticket, prompt or "
            f"reward of policy {policy} has this id. Ids are compared whole; raw events are kept for a short time only."
        )
    parts: list[RenderableType] = [render(tell(topics, subject), text=text)]
    for ticket in subject.tickets[:MOST_TICKETS]:
        found = find(topics, str(ticket))
        if found is not None:
            parts.append(render(tell(topics, replace(found, kind="ticket")), text=text))
    if len(subject.tickets) > MOST_TICKETS:
        rest = ", ".join(map(str, subject.tickets[MOST_TICKETS:]))
        return WhyAnswer(_text(parts, colour) + f"\nand tickets {rest}: ask for one of them", known=True)
    return WhyAnswer(_text(parts, colour), known=True)


def _unknown(text: str) -> WhyAnswer:
    return WhyAnswer(clean(text), known=False)


def _text(parts: list[RenderableType], colour: bool) -> str:
    out = StringIO()
    console = Terminal(
        file=out, width=WIDTH if colour else None, force_terminal=colour, no_color=not colour, highlight=False
    )
    for part in parts:
        console.print(part)
    return out.getvalue().rstrip()
