"""What a start need not read again of the capture log: a file beside it, `checkpoint`, written while the gateway runs.

    state at entry number `end`, copied on the event loop -> encoded and written by a thread -> renamed into its place

The file says what became of the sessions that have ended, and where in the log the entries of those lie whose content
is still needed: live sessions, and sessions whose responses a request may name. A start reads these entries, then all
from `end` on: it costs what is alive, not what has been.

Invariants: a start by a checkpoint leaves the state that folding the whole log would leave; a checkpoint that is torn,
of another release or of another log is as good as none; one that an entry was added to while it was encoded is right
too, because folding that entry again changes nothing; it holds digests, ids and places, never what anybody said. When
it is in its place, the file of replies under way names none that was recorded before `end`."""

from __future__ import annotations

import io
import itertools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from millrace.infra import durable, faults
from millrace.producers.capture.log import CaptureLog
from millrace.producers.capture.segments import entries, frame
from millrace.schemas.records import Split

logger = logging.getLogger(__name__)

FILE = "checkpoint"
FORMAT = 1
ENTRIES = 5_000
"""entries of the log after which another checkpoint is written"""
CHUNK = 256
"""items that are encoded at once: the event loop waits for no more"""


class CheckpointHead(msgspec.Struct, array_like=True):
    """Whose state it is: that of the log of this source, up to entry number `end`."""

    format: int
    source: str
    end: int
    limits: dict[str, float]
    """hours of the budget of each key that has limits: sums of other windows say nothing"""
    spending: dict[str, tuple[int, float, int, float]]
    unreadable: list[str]
    broken_chains: list[str]
    doubtful: list[str]


class ContentPlaces(msgspec.Struct, array_like=True):
    """A session whose entries are read again: where they lie, and whether its name and its attempt lead to it."""

    id: str
    places: list[tuple[int, int]]
    is_live: bool
    has_alias: bool
    has_attempt: bool


class EndedSession(msgspec.Struct, array_like=True):
    """What a late reward needs of a session; `is_newest`: of those of its name."""

    id: str
    tenant: str
    policy: str
    group: str
    root: str
    attempt: str
    split: Split
    start: dict[str, Any]
    parent: str | None
    spawn_call: str | None
    step: int
    link: bytes
    is_whole: bool
    alias: str | None
    subject: str
    payer: str
    nameless: bool
    began: int
    rewards: list[tuple[str, str]]
    report_numbers: dict[str, int]
    is_newest: bool


Reply = tuple[bytes, str | None]
SpentReply = tuple[str, str, bytes]


class SessionsCheckpoint(msgspec.Struct):
    """All of it; each list in the order in which a fold would have made it."""

    head: CheckpointHead
    content: list[ContentPlaces]
    ended_sessions: list[EndedSession]
    replies: list[Reply]
    spent_replies: list[SpentReply]


LISTS: tuple[tuple[str, Any], ...] = (
    ("content", ContentPlaces),
    ("ended_sessions", EndedSession),
    ("replies", Reply),
    ("spent_replies", SpentReply),
)
_encode = msgspec.msgpack.Encoder().encode
END = _encode("end")


def write(folder: Path, head: CheckpointHead, lists: list[Iterator[Any]]) -> None:
    """Put a checkpoint in the place of the former. `lists` are those of `LISTS`. Raises OSError; the former stands."""
    out = io.BytesIO()
    out.write(frame(_encode(head)))
    for items in lists:
        while chunk := list(itertools.islice(items, CHUNK)):
            out.write(frame(_encode(chunk)))
        out.write(frame(END))
    faults.point("checkpoint.encoded")
    durable.write(folder / FILE, out.getvalue(), sync=False)
    faults.point("checkpoint.written")


def read(log: CaptureLog) -> SessionsCheckpoint | None:
    """The checkpoint of this log; None, and a line in our log that says why, where there is none that can be used."""
    path = log.folder / FILE
    if not path.exists():
        if log.end > ENTRIES:
            logger.warning("%s has no checkpoint: all of its %d entries are read", log.folder, log.end - log.begin)
        return None
    try:
        payloads = (payload for payload, _ in entries(path))
        head = msgspec.msgpack.decode(next(payloads, b""), type=CheckpointHead)
        if (head.format, head.source) != (FORMAT, log.source) or not log.begin <= head.end <= log.end:
            raise ValueError(f"it is of {head.source} up to entry {head.end}, format {head.format}")
        lists = {name: list(_items(payloads, type)) for name, type in LISTS}
        return SessionsCheckpoint(head, **lists)
    except (OSError, ValueError) as error:  # those of msgspec are ValueErrors too
        logger.warning("%s cannot be used, so the whole log is read: %s", path, error)
        return None


def _items(payloads: Iterator[bytes], type: Any) -> Iterator[Any]:
    decode: Callable[[bytes], list[Any]] = msgspec.msgpack.Decoder(list[type]).decode
    while (payload := next(payloads, None)) != END:
        if payload is None:
            raise ValueError("it is torn")
        yield from decode(payload)
