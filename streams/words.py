"""What every stage needs to read and to answer: decoded records, places, deterministic ids, dead letters.

Invariant: nothing here knows a clock or draws a random number, so a turn that is folded again makes the same records,
ids included."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from infra.bus.base import Record
from infra.claims import ClaimStore
from infra.errors import ClaimError
from infra.stage import Emit
from schemas import codec
from schemas.errors import CorruptRecord, UnknownSchema
from schemas.ids import Micros

SPACE = uuid.UUID("6d696c6c-7261-4365-8000-000000000001")
DEAD_LETTERS = "dead-letters"
Place = dict[str, Any]


def made_id(*parts: object) -> str:
    """An id that follows from its parts alone."""
    return str(uuid.uuid5(SPACE, "\x1f".join(str(part) for part in parts)))


def place_of(record: Record) -> Place:
    """Where a record lies, as a Place record."""
    return {"topic": record.topic, "partition": record.partition, "offset": record.offset}


class Unreadable(Exception):
    """A record that a stage cannot read: a code and words without content. Never leaves its stage."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code


class Decoder:
    """Decodes records, behind claims too, and remembers the last: a stage is asked for a record's time, then given it.

    Claims are named by the hash of their bytes, so looking behind one keeps a fold repeatable."""

    __slots__ = ("_claims", "_last", "_max_bytes", "_record")

    def __init__(self, claims: ClaimStore | None = None, max_bytes: int = 1 << 30) -> None:
        self._claims = claims
        self._max_bytes = max_bytes
        self._record: Record | None = None
        self._last: tuple[str, dict[str, Any]] = ("", {})

    def __call__(self, record: Record) -> tuple[str, dict[str, Any]]:
        """(record name, record). Raises Unreadable."""
        if record is not self._record:
            self._last = self._decode(record.value)
            self._record = record
        return self._last

    def _decode(self, data: bytes | None) -> tuple[str, dict[str, Any]]:
        if data is None:
            raise Unreadable("empty", "the record has no value")
        if len(data) > self._max_bytes:
            raise Unreadable("oversize", f"{len(data)} bytes, at most {self._max_bytes} are taken")
        try:
            name, found = codec.decode(data)
            if name != "Claim":
                return name, found
            if found["size"] > self._max_bytes:
                raise Unreadable("oversize", f"{found['size']} bytes, at most {self._max_bytes} are taken")
            if self._claims is None:
                raise Unreadable("claim_lost", "no claims directory is set")
            return codec.decode(self._claims.load(found))
        except UnknownSchema:
            raise Unreadable("unknown_schema", "no schema of this release has the record's fingerprint") from None
        except CorruptRecord:
            raise Unreadable("undecodable", "the bytes are no record of ours") from None
        except ClaimError:
            raise Unreadable("claim_lost", "the bytes behind the record's claim are missing or changed") from None


def dead_letter(
    stage: str,
    place: Mapping[str, Any],
    reason: str,
    detail: str,
    now: Micros,
    *,
    key: str,
    event: Mapping[str, Any] | None = None,
    partition: int | None = None,
) -> Emit:
    """The record that says why something ends here. `detail` must not quote content.

    `event` is anything with an envelope's ids: an event, or what a stage kept of one."""
    known = event or {}
    return Emit(
        DEAD_LETTERS,
        key,
        "DeadLetter",
        {
            "id": made_id("dead-letter", stage, place["topic"], place["partition"], place["offset"], reason),
            "stage": stage,
            "place": dict(place),
            "reason": reason,
            "detail": detail,
            "event_id": known.get("id"),
            "policy": known.get("policy"),
            "tenant": known.get("tenant"),
            "group": known.get("group"),
            "trajectory": known.get("trajectory"),
            "time": now,
        },
        partition=partition,
        headers={"reason": reason, "stage": stage},
    )
