"""Which rows of a refused block cannot be read: found by halving, and judged one by one.

Invariants: whether a row is sound, and why not, depends on its bytes alone, never on its neighbours, the disk or the
memory of the moment; what cannot be told is raised, so that it is tried again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from millrace.consumers.warehouse.ingest.table_choice import Behind
from millrace.infra.errors import WarehouseError
from millrace.infra.log.base import Record
from millrace.schemas import codec
from millrace.schemas.errors import SchemaError

Row = tuple[int, bytes]
MEMORY = 241
"""what a length that is no length asks for, and what readers may have taken"""
ABOUT_BYTES = frozenset({32, 33, 36, 69, 117, 128, 131, 190, 321, 349, 395, 407, 748, 1001})
"""ClickHouse's codes for bytes that are not what they should be"""


def undecodable(
    rows: Sequence[Row], attempt: Callable[[Sequence[Row]], None], records: Mapping[int, Record], behind: Behind
) -> list[tuple[int, str]]:
    """Offsets and reasons of rows that cannot be read. `attempt` raises WarehouseError for rows of which one cannot.
    Raises what it raises where that is not about the bytes of a row."""
    if not rows:
        return []
    try:
        attempt(rows)
    except WarehouseError as error:
        if len(rows) > 1:
            half = len(rows) // 2
            return [
                *undecodable(rows[:half], attempt, records, behind),
                *undecodable(rows[half:], attempt, records, behind),
            ]
        offset = rows[0][0]
        fault = _fault(records[offset], behind)
        if error.code in ABOUT_BYTES or (error.code == MEMORY and fault):
            return [(offset, fault or f"ClickHouse cannot read it (code {error.code})")]
        raise
    return []


def _fault(record: Record, behind: Behind) -> str:
    """Why a record does not decode, empty where it does. What the engine says of it would not do: that depends on the
    number behind the row too."""
    try:
        found: dict[str, Any]
        name, found = codec.decode(behind(record.value or b""))
        if name == "Event" and found["body_encoding"] == "plain":
            codec.decode(found["body"])
    except SchemaError as error:
        return str(error)
    return ""
