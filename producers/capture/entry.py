"""One entry of the capture log: a record for `raw`, ready to be sent."""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class Entry(msgspec.Struct, array_like=True, frozen=True):
    """A record for `raw`: its key, its headers and its encoded event."""

    key: str
    headers: dict[str, str]
    value: bytes


class Kept(NamedTuple):
    """An entry as read back: its number and its bytes on disk."""

    seq: int
    entry: Entry
    size: int


encode = msgspec.msgpack.Encoder().encode
"""the payload of an entry"""

decode = msgspec.msgpack.Decoder(Entry).decode
"""the entry of a payload"""
