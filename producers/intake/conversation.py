"""What a conversation that passes is folded into: the seam between what reads the bytes and what they mean.

Invariant: a fold decides nothing about what passes, and raises nothing for what it cannot read: it is no event then."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator
from typing import NamedTuple

from millrace.producers.intake.jsonrpc import Message
from millrace.schemas.json_values import JsonObject
from millrace.schemas.records import ToolStatus

Event = JsonObject
"""one of those that `POST /v1/sessions/{id}/events` takes; or of `kind` "end", what its `POST .../end` takes"""


class Owner(NamedTuple):
    """Whose conversation it is: the key of a session, and its gateway's base URL."""

    key: str
    base_url: str


class ChildEvent(NamedTuple):
    """An event of another session than the one whose conversation it is: of what was begun by it."""

    owner: Owner
    event: Event


class ConversationFold(ABC):
    """A client and a server that speak JSON-RPC, as events. Times are micros."""

    @abstractmethod
    def from_client(self, message: Message, now: int, traceparent: str | None = None) -> Iterator[Event | ChildEvent]:
        """The client said this."""

    @abstractmethod
    def from_server(self, message: Message, now: int) -> Iterator[Event | ChildEvent]:
        """The server said this."""

    @abstractmethod
    def broken_off(
        self, ids: Iterable[Hashable | None], status: ToolStatus, why: str, now: int
    ) -> Iterator[Event | ChildEvent]:
        """No answer comes to these requests, if they still wait."""
