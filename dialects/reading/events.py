"""Server-sent events on their way to a client, read from a copy: the part that all APIs share.

Invariants: nothing that a server sends raises; what is no event of a known shape, or is too long, too deep or of too
many values to be looked into, is counted in `unread` and left out; memory is bounded by `LARGEST`."""

from __future__ import annotations

from abc import ABC, abstractmethod

import orjson

from millrace.dialects import shape
from millrace.dialects.answers import error_in
from millrace.schemas import bounds
from millrace.schemas.json_values import JsonObject

LARGEST = 8 << 20
"""bytes of an upstream's reply that are kept; a longer one passes and is not captured whole"""
END_MARK = b"[DONE]"
"""the data of the event with which streams of OpenAI's older APIs end"""
NO_WORDS = "an error without a message"
SKIPPED_FIELDS = (b":", b"event:", b"id:", b"retry:")
"""how lines of events begin that say nothing of a reply"""


class ReplyEvents(ABC):
    """A whole stream, whose `data` lines are JSON objects."""

    def __init__(self) -> None:
        self.finish: str | None = None
        """why the stream ended, where that is not for its events to say"""
        self.unread = 0
        """events, or parts of them, that could not be read"""
        self.unread_bytes = 0
        """bytes of those that could not be read, and of what was no event"""
        self.size = 0
        self.closing = False
        """whether an event said that the reply, or one of its choices, is at its end: any event may be the last"""
        self.error = ""
        """the error that ended the stream, in its server's words"""
        self._rest = bytearray()
        self._long = False
        """whether the line whose beginning came is too long, and passed over"""

    def feed(self, part: bytes) -> None:
        """More bytes of the event stream."""
        self.size += len(part)
        if self.size > LARGEST:
            self._pass_over(len(self._rest) + len(part))
            self._rest.clear()
            return
        *lines, rest = part.split(b"\n")
        for line in lines:
            self._more(line)
            if not self._long:
                self._line(bytes(self._rest))
            self._rest.clear()
            self._long = False
        self._more(rest)

    def _more(self, part: bytes) -> None:
        """More of the line that is open."""
        if self._long:
            self.unread_bytes += len(part)
            return
        self._rest += part
        if len(self._rest) > bounds.EVENT_BYTES:
            self._pass_over(len(self._rest))
            self._long = True
            self._rest.clear()

    def _pass_over(self, size: int) -> None:
        """One more event, or a part of one, of so many bytes is not looked into."""
        self.unread += 1
        self.unread_bytes += size

    def _line(self, line: bytes) -> None:
        data = line.removeprefix(b"data:").strip()
        if not line.startswith(b"data:"):
            if not line.startswith(SKIPPED_FIELDS):
                self.unread_bytes += len(data)
        elif data == END_MARK:
            self.closing = True
        elif data and not self._event(data):
            self._pass_over(len(data))

    def _event(self, data: bytes) -> bool:
        if shape.unwieldy(data):
            return False
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError:
            return False
        if not isinstance(event, dict):
            return False
        if event.get("error") or event.get("type") == "error":
            self.error, self.closing = error_in(event) or NO_WORDS, True
        return self.take(event)

    @abstractmethod
    def take(self, event: JsonObject) -> bool:
        """One more event; whether all of it could be read."""

    @abstractmethod
    def response(self) -> JsonObject:
        """The whole response that the stream amounts to, so far: none of the API's where no event of one came, but for
        one that is aborted."""
