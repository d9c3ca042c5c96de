"""JSON-RPC as it passes: a stream of bytes cut into lines or server-sent events, and a line read into messages.

Invariants: what is read depends on the bytes alone, not on how they were cut into pieces; memory is bounded by `limit`
and one piece; a line beyond the limit is given as its size; a member that nobody asks for is not read."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import msgspec
import orjson

from millrace.schemas.json_values import Json

LIMIT = 64 << 20
"""bytes of a line that is read; a longer one passes unread"""

Message = dict[str, msgspec.Raw]
"""the members of a JSON object, unread"""

_message = msgspec.json.Decoder(Message)
_batch = msgspec.json.Decoder(list[msgspec.Raw])


class TooLong(int):
    """The size in bytes of a line or an event that was not kept."""


class Lines:
    """Cuts a stream into lines, without their ends; an empty line is one too."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> Iterator[bytes | TooLong]:
        """The lines that these bytes end."""
        *ends, rest = data.split(b"\n")
        for part in ends:
            self._add(part)
            yield self._take_line()
        self._add(rest)

    def end(self) -> Iterator[bytes | TooLong]:
        """The line that the end of the stream ends, if there is one."""
        if self._size:
            yield self._take_line()

    def _add(self, part: bytes) -> None:
        self._size += len(part)
        if self._size > self._limit:
            self._parts.clear()
        elif part:
            self._parts.append(part)

    def _take_line(self) -> bytes | TooLong:
        line = b"".join(self._parts) if self._size <= self._limit else TooLong(self._size)
        self._parts, self._size = [], 0
        return line


class WholeMessage(Lines):
    """One message, whatever lines it has."""

    def feed(self, data: bytes) -> Iterator[bytes | TooLong]:
        """Nothing: it ends with the stream."""
        self._add(data)
        return iter(())


class EventCutter:
    """Cuts a stream into the data of server-sent events, whose lines end in CR, LF or both."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._lines = Lines(limit)
        self._data: list[bytes] = []
        self._size = 0
        self._return = b""

    def feed(self, data: bytes) -> Iterator[bytes | TooLong]:
        """The data of the events that these bytes end."""
        data, self._return = self._return + data, b""
        if data.endswith(b"\r"):  # the first half of an end, maybe
            data, self._return = data[:-1], b"\r"
        for line in self._lines.feed(data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")):
            yield from self._line(line)

    def end(self) -> Iterator[bytes | TooLong]:
        """An event that its stream cuts off is none."""
        if self._return:
            for line in self._lines.feed(b"\n"):
                yield from self._line(line)

    def _line(self, line: bytes | TooLong) -> Iterator[bytes | TooLong]:
        if isinstance(line, TooLong):
            self._size += line
            self._data.clear()
        elif line:
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
                self._size += len(self._data[-1])
            if self._size > self._limit:
                self._data.clear()
        else:
            data, size = self._data, self._size
            self._data, self._size = [], 0
            if size > self._limit:
                yield TooLong(size)
            elif data:
                yield b"\n".join(data)


def messages(line: bytes) -> list[Message]:
    """The messages of a line: one, those of a batch, none of an empty one. Raises ValueError for anything else."""
    text = line.strip()
    if not text:
        return []
    try:
        return [_message.decode(one) for one in _batch.decode(text)] if text[:1] == b"[" else [_message.decode(text)]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def member(message: Message, name: str) -> Json:
    """A member, read; None where it is missing or cannot be read."""
    raw = message.get(name)
    if raw is None:
        return None
    try:
        found: Json = orjson.loads(bytes(raw))
    except orjson.JSONDecodeError:
        return None
    return found


def members(message: Message, name: str) -> Message:
    """The members of a member that is an object; else none."""
    raw = message.get(name)
    if raw is None:
        return {}
    try:
        return _message.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}


def text(raw: msgspec.Raw) -> str:
    """JSON as it was sent. Bytes that are no UTF-8 become U+FFFD."""
    return bytes(raw).decode(errors="replace")


def id_of(message: Message, name: str = "id") -> Hashable | None:
    """What an id is told apart by, whatever JSON it is; None where there is none: `null` is an id like any other."""
    raw = message.get(name)
    if raw is None:
        return None
    try:
        value = orjson.loads(bytes(raw))
    except orjson.JSONDecodeError:
        return ("raw", bytes(raw))
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return ("json", bytes(raw))
    return ("string" if isinstance(value, str) else "number", value)
