"""Which of the model's tool calls is being made: a call that is seen on its way to the tool has no id of the model's.

A call is joined to an ask by the tool's name, the canonical arguments and the time: an ask is open from its reply until
a later call of the model echoes its result, and each is joined once.

Invariants: an ask is named only where it is the one that fits; where several fit the call is `ambiguous`, and names
their reply if they have one in common; where none fits it is `absent`. What `match_ask` says depends on the asks and
the call alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from millrace.dialects import match_keys
from millrace.dialects.rendering.base import Message
from millrace.schemas.records import ToolJoin

SLACK_US = 1_000_000
"""micros by which the clocks of two machines may differ"""
MOST = 1024
"""asks of a session that are kept, the newest"""
SEPARATORS = ("__", ".", "/", ":")
"""what stands between the name that an agent gave a server and the server's own name of a tool"""


@dataclass(slots=True, eq=False)
class ToolAsk:
    """A tool call of a reply. `since` and `until` are micros; `until`: when its result was first echoed."""

    id: str
    response: str
    name: str
    arguments: bytes
    since: int
    until: int | None = None


class AskMatch(NamedTuple):
    """What a join came to; `ask` where it is unique."""

    join: ToolJoin
    response: str | None = None
    ask: ToolAsk | None = None


def match_ask(asks: Iterable[ToolAsk], name: str, arguments: str, at: int) -> AskMatch:
    """The ask that a call of `name` at `at` (micros) carries out. An agent may have put its server's name before the
    tool's; one that fits without counts first."""
    canonical_arguments = match_keys.canonical_json(arguments)
    fitting = [
        ask
        for ask in asks
        if ask.arguments == canonical_arguments
        and ask.since <= at + SLACK_US
        and (ask.until is None or at <= ask.until + SLACK_US)
        and _names(ask.name, name)
    ]
    fitting = [ask for ask in fitting if ask.name == name] or fitting
    if len(fitting) == 1:
        return AskMatch("unique", fitting[0].response, fitting[0])
    responses = {ask.response for ask in fitting}
    return AskMatch("ambiguous" if fitting else "absent", responses.pop() if len(responses) == 1 else None)


def _names(tool: str, name: str) -> bool:
    return tool == name or any(tool.endswith(separator + name) for separator in SEPARATORS)


class Asks:
    """Those of one session that were not joined yet."""

    def __init__(self) -> None:
        self.waiting: list[ToolAsk] = []

    def note_call(self, messages: Sequence[Mapping[str, object]], at: int, supersedes: str | None = None) -> None:
        """The model was called with these messages: results that they echo are settled, and what a superseded reply
        asked never reached its client."""
        self.waiting = [
            ask
            for ask in self.waiting
            if ask.response != supersedes and (ask.until is None or at <= ask.until + SLACK_US)
        ]
        if self.waiting:
            echoes = {message.get("tool_call_id") for message in messages if message["role"] == "tool"}
            for ask in self.waiting:
                if ask.until is None and ask.id and ask.id in echoes:
                    ask.until = at

    def note_reply(self, response: str, reply: Message, at: int) -> None:
        """The model asked for the tool calls of a reply."""
        for call in reply.get("tool_calls") or ():
            function = call["function"]
            self.waiting.append(
                ToolAsk(call["id"], response, function["name"], match_keys.canonical_json(function["arguments"]), at)
            )
        del self.waiting[:-MOST]

    def join(self, name: str, arguments: str, at: int) -> AskMatch:
        """`match_ask` of those that wait. The ask is joined to nothing else once it is `settle`."""
        return match_ask(self.waiting, name, arguments, at)

    def joined_before(self, id: str | None) -> None:
        """The log says that a call was joined to the oldest ask of this id."""
        self.settle(next((ask for ask in self.waiting if ask.id == id), None))

    def settle(self, ask: ToolAsk | None) -> None:
        """An ask is joined."""
        if ask is not None:
            self.waiting.remove(ask)
