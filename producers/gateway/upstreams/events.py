"""Server-sent events on their way to a client, read from a copy: the part that all APIs share.

Invariants: nothing that a server sends raises; what is no event of a known shape is counted in `unread` and left out;
memory is bounded by `LARGEST`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import orjson

LARGEST = 8 << 20
"""bytes of an upstream's reply that are kept; a longer one passes and is not captured whole"""


class Events(ABC):
    """A whole stream, whose `data` lines are JSON objects."""

    def __init__(self) -> None:
        self.finish: str | None = None
        """why the stream ended, where that is not for its events to say"""
        self.unread = 0
        """events, or parts of them, that could not be read"""
        self.size = 0
        self._rest: list[bytes] = []

    def feed(self, part: bytes) -> None:
        """More bytes of the event stream."""
        self.size += len(part)
        if self.size > LARGEST:
            self._rest.clear()
            self.unread += 1
            return
        *lines, rest = part.split(b"\n")
        if lines:
            lines[0] = b"".join([*self._rest, lines[0]])
            self._rest.clear()
        self._rest.append(rest)
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data and data != b"[DONE]":
                self.unread += not self._event(data)

    def _event(self, data: bytes) -> bool:
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError:
            return False
        return isinstance(event, dict) and self.take(event)

    @abstractmethod
    def take(self, event: dict[str, Any]) -> bool:
        """One more event; whether all of it could be read."""

    @abstractmethod
    def response(self) -> dict[str, Any]:
        """The whole response that the stream amounts to, so far: none of the API's where no event of one came, but for
        one that is aborted."""
