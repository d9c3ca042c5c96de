"""What a request may name of what was said before: responses by their ids, and what they answered.

The gateway's sessions keep them (`millrace.producers.gateway.sessions.responses`); a dialect asks a `Recall`, and is
given the responses of one caller.

Invariants: a conversation is given whole or not at all; nobody is given what another caller was told, and learns no
more of it than of an id that nobody has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import msgspec

from millrace.schemas.json_values import Json

ORIGIN = "_origin"
"""header of a call's entry: where its response is kept"""

Owner: TypeAlias = tuple[str, ...]
"""whose conversation it is"""


class ResponseOrigin(NamedTuple):
    """Who answered with a response: an upstream, by its name, or an engine of ours, "". `away`: that upstream keeps it
    itself, under the id that it gave; `whole`: all that it read is known here."""

    by: str = ""
    away: bool = False
    whole: bool = True

    def note(self) -> dict[str, str]:
        """The header of the entry of a call, of an upstream's response that is kept."""
        return {ORIGIN: f"{'away' if self.away else 'here'} {self.by}"}


LOCAL_ORIGIN = ResponseOrigin()


class StoredRequest(NamedTuple):
    """What a request that is to be kept said: its items as JSON, the whole conversation, and the response that it
    named."""

    items: list[bytes]
    previous: str | None


@dataclass(slots=True, eq=False)
class StoredResponse:
    """A response. `said`: the items that its request added to what `before` was asked, and answered where it `follows`,
    and the response itself; None once that is forgotten."""

    id: str
    owner: Owner
    session: str
    before: StoredResponse | None
    follows: bool
    said: tuple[list[bytes], bytes] | None
    size: int
    owned: tuple[str, ...] = ()
    """its items whose ids do not say that they are"""
    origin: ResponseOrigin = LOCAL_ORIGIN
    deleted: bool = False
    """whether it can be named no more; what goes on from it has its words all the same"""
    used: int = 0
    """micros; never before a response that goes on from it"""

    def conversation(self) -> list[bytes] | None:
        """The items that the next turn goes on from; None where a part of them is forgotten."""
        line: list[tuple[bool, list[bytes], bytes]] = []
        at: StoredResponse | None = self
        while at is not None:
            # In this order: whoever forgets it meanwhile takes `said` first.
            before, turn = at.before, at.said
            if turn is None or not at.origin.whole:
                return None
            line.append((at.follows, *turn))
            at = before
        out: list[bytes] = []
        output: list[bytes] = []
        for follows, items, response in reversed(line):
            out += [*(output if follows else ()), *items]
            output = output_of(response)
        return out + output


def items_of(response: bytes) -> list[dict[str, Any]]:
    """The items of a response that this gateway wrote, or that `items_alone` made."""
    items: list[dict[str, Any]] = msgspec.json.decode(response)["output"]
    return items


def output_of(response: bytes) -> list[bytes]:
    """They as JSON."""
    return [msgspec.json.encode(item) for item in items_of(response)]


class Recall(ABC):
    """What one caller may name in one call. `used`: the responses that it named and that are known."""

    used: list[StoredResponse]

    @abstractmethod
    def conversation(self, id: str) -> list[bytes] | None:
        """The items up to the end of a response; None where it is not known. Raises ApiError 400 for more bytes than a
        request may have."""

    @abstractmethod
    def item(self, id: str) -> bytes | None:
        """One item of a response; None where it is not known. Raises ApiError 400 like `conversation`."""

    @abstractmethod
    def is_known(self, id: str) -> bool:
        """Whether a response of this id is known, if only to which caller it belongs; it is used then."""

    @abstractmethod
    def is_foreign(self, id: str) -> bool:
        """Whether another caller was given a response of this id, or an item."""

    @abstractmethod
    def response(self, id: str) -> bytes | None:
        """The whole response; None where it is not known, or not kept here."""

    @abstractmethod
    def request_items(self, id: str) -> list[bytes] | None:
        """The items that a response was asked with, from the beginning of its conversation; None where they are not
        known."""

    @abstractmethod
    def keeper(self, id: str) -> str | None:
        """The upstream that keeps a response itself; None for one that is kept here, or not known."""


class NoRecall(Recall):
    """That of a caller who was never given anything."""

    def __init__(self) -> None:
        self.used = []

    def conversation(self, id: str) -> None:
        return None

    def item(self, id: str) -> None:
        return None

    def is_known(self, id: str) -> bool:
        return False

    def is_foreign(self, id: str) -> bool:
        return False

    def response(self, id: str) -> None:
        return None

    def request_items(self, id: str) -> None:
        return None

    def keeper(self, id: str) -> None:
        return None


Recaller: TypeAlias = Callable[[Sequence[Json]], Recall]
"""What the caller of a request may name, by what the request says of its end user"""


def no_recall(users: Sequence[Json]) -> Recall:
    """Of a caller who was never given anything."""
    return NoRecall()
