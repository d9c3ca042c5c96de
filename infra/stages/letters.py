"""Dead letters: the record that says why something ends here, with ids that follow from its parts.

Invariants: nothing here knows a clock or draws a random number, so a turn that is folded again makes the same letters;
a letter never quotes content, and it always fits its topic, however long the names are that it refers to."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping
from typing import Any, cast

from millrace.infra.log.base import Record
from millrace.infra.stages.base import Emit
from millrace.schemas import bounds
from millrace.schemas.ids import Micros
from millrace.schemas.records import DeadLetter, Place

SPACE = uuid.UUID("6d696c6c-7261-4365-8000-000000000001")
DEAD_LETTERS = "dead-letters"
UNFOLDABLE = "unfoldable"
"""reason of the runner's own letters: folding a record, or a timer, raised"""


def made_id(*parts: object) -> str:
    """An id that follows from its parts alone."""
    return str(uuid.uuid5(SPACE, "\x1f".join(str(part) for part in parts)))


def place_of(record: Record) -> Place:
    """Where a record lies, as a Place record."""
    return {"topic": record.topic, "partition": record.partition, "offset": record.offset}


def bounded_name(name: str) -> str:
    """A name as it is, or its digest where it is longer than a name may be."""
    data = name.encode("utf-8", "backslashreplace")
    if len(data) <= bounds.NAME_BYTES:
        return data.decode()
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def dead_letter(
    stage: str,
    place: Place,
    reason: str,
    detail: str,
    now: Micros,
    *,
    key: str,
    event: Mapping[str, Any] | None = None,
    partition: int | None = None,
    distinct: str = "",
) -> Emit:
    """The record that says why something ends here. `detail` must not quote content.

    `event` is anything with an envelope's ids: an event, or what a stage kept of one. `distinct` tells letters apart
    that have one place and one reason."""
    ids = event or {}
    parts = ("dead-letter", stage, place["topic"], place["partition"], place["offset"], reason)
    letter: DeadLetter = {
        "id": made_id(*parts, distinct) if distinct else made_id(*parts),
        "stage": stage,
        "place": {**place},
        "reason": reason,
        "detail": detail[: bounds.NAME_BYTES],
        "event_id": _short_or_none(ids.get("id")),
        "policy": _short_or_none(ids.get("policy")),
        "tenant": _short_or_none(ids.get("tenant")),
        "group": _short_or_none(ids.get("group")),
        "trajectory": _short_or_none(ids.get("trajectory")),
        "time": now,
    }
    return Emit(
        DEAD_LETTERS,
        bounded_name(key),
        "DeadLetter",
        letter,
        partition=partition,
        headers={"reason": reason, "stage": stage},
    )


def refuses(emit: Emit, record: Record) -> bool:
    """Whether an emit is the dead letter of this very record."""
    return emit.topic == DEAD_LETTERS and cast(DeadLetter, emit.record)["place"] == place_of(record)


def _short_or_none(name: str | None) -> str | None:
    return None if name is None else bounded_name(name)
