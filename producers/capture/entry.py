"""One entry of the capture log: a record for `raw`, ready to be sent."""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class Entry(msgspec.Struct, array_like=True, frozen=True):
    """A record for `raw`: its key, its headers and its encoded event. Headers that begin with `_` are this folder's own
    and are never sent on."""

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

encode_into = msgspec.msgpack.Encoder().encode_into
"""the payload of an entry into a buffer, behind a number of bytes"""

decode = msgspec.msgpack.Decoder(Entry).decode
"""the entry of a payload"""
