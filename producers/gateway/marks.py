"""Ids that say which process of a gateway minted them, so that whoever is told one can find the session behind it.

The last three bytes of an id are its mark: two that follow from the rest of it and from the process's index, and the
index. What nobody here minted passes for marked once in 65,536 times, and what is found by a mark is never more than a
place to ask first.

Invariants: a marked id is a uuid7, or a `call_` id, as one without a mark is, and sorts by its creation; a mark is read
wherever the id stands in a longer one (`resp_...`, `msg_..._0`, a session's key)."""

from __future__ import annotations

import os
import re
from hashlib import blake2b

from millrace.schemas.ids import new_id

MOST = 64
"""processes of one gateway"""
UUID7 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", re.ASCII)
_CALL = re.compile(r"_([0-9a-f]{24})$", re.ASCII)
_DIGITS = 6
"""of the mark, in hexadecimal"""


def marked_id(index: int) -> str:
    """A fresh id of a session or a response."""
    return _with_mark(new_id(), index)


def minted_call(index: int) -> str:
    """A fresh id of a tool call."""
    return f"call_{_with_mark(os.urandom(12).hex(), index)}"


def index_of(id: str) -> int | None:
    """The index of the process that minted this id; None for one without a mark."""
    match = UUID7.search(id)
    if match is not None:
        text = match.group()
    elif (call := _CALL.search(id)) is not None:
        text = call.group(1)
    else:
        return None
    index = int(text[-2:], 16)
    return index if index < MOST and text[-_DIGITS:] == _mark(text[:-_DIGITS], index) else None


def _with_mark(text: str, index: int) -> str:
    return text[:-_DIGITS] + _mark(text[:-_DIGITS], index)


def _mark(rest: str, index: int) -> str:
    check = blake2b(rest.encode(), digest_size=2, key=index.to_bytes(1, "big")).hexdigest()
    return f"{check}{index:02x}"
