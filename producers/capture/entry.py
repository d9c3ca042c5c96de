"""One entry of the capture log: a record for `raw`, ready to be sent."""

from __future__ import annotations

import struct
from typing import NamedTuple

import msgspec

BULK = 1 << 16
"""bytes of an event from which on it is written without a copy"""
BIN = struct.Struct(">BI")
"""what stands before such bytes in msgpack"""


class Entry(msgspec.Struct, array_like=True, frozen=True):
    """A record for `raw`: its key, its headers and its encoded event. Headers that begin with `_` are this folder's own
    and are never sent on."""

    key: str
    headers: dict[str, str]
    value: bytes


class StoredEntry(NamedTuple):
    """An entry as read back: its number, its bytes on disk, and the byte of its file at which it begins."""

    seq: int
    entry: Entry
    size: int
    offset: int = 0


encode = msgspec.msgpack.Encoder().encode
"""the payload of an entry"""

encode_into = msgspec.msgpack.Encoder().encode_into
"""the payload of an entry into a buffer, behind a number of bytes"""

decode = msgspec.msgpack.Decoder(Entry).decode
"""the entry of a payload"""


def head_into(entry: Entry, data: bytearray, at: int) -> None:
    """The payload of an entry with a `BULK` event into a buffer from byte `at` on, up to that event's own bytes."""
    encode_into(Entry(entry.key, entry.headers, b""), data, at)
    del data[-len(encode(b"")) :]
    data += BIN.pack(0xC6, len(entry.value))
