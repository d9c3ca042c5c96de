"""One decoded record of the log, with its place.

Invariant: a row is one of the records that its kind of topic holds, or it is not made."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple, cast

from millrace.infra.log.base import Place, Record
from millrace.infra.log.history.kinds import HOLDS, R
from millrace.schemas.codec import decode, decode_body
from millrace.schemas.errors import CorruptRecord
from millrace.schemas.records import Event, Fields
from millrace.schemas.records import Place as StoredPlace

Resolve = Callable[[Record], Record]
"""turns a record that stands for a claim into the record that was claimed, and any other into itself"""


def as_stored(record: Record) -> Record:
    """Resolves nothing: what stands for a claim is none of the records that its topic holds."""
    return record


def place_of(record: StoredPlace) -> Place:
    """The bus's place of a schema's place."""
    return Place(record["topic"], record["partition"], record["offset"])


class Mark(NamedTuple):
    """What is kept of a row to name it later."""

    place: Place
    time: int


class Row(Fields[R]):
    """One decoded record; `row["time"]` is a field of it, and a misspelt one an error of the type checker. `raw` is the
    record as it lies in the log (offset, timestamp, key, headers); `value` its bytes, those behind a claim where it was
    one; `kind` that of its topic."""

    def __init__(self, raw: Record, name: str, record: R, value: bytes, kind: str = "") -> None:
        self.raw = raw
        self.name = name
        self.record = record
        self.value = value
        self.kind = kind
        self.place = raw.place
        self.mark = Mark(self.place, raw.timestamp)

    @cached_property
    def body(self) -> Any:
        """The body of an event, one of `schemas.records.Body`: who reads it says which (`call: ModelCall = row.body`).
        Raises SchemaError when it does not decode."""
        event = cast("Event", self.record)
        return decode_body(event["kind"], event["body"])

    def places(self, field: str = "trajectories") -> list[Place]:
        """A list of places that the record holds."""
        record: Any = self.record
        return [place_of(place) for place in record[field]]


def row_of(kind: str, record: Record, resolve: Resolve = as_stored) -> Row[Any]:
    """The row of a record that lies in this kind of topic. Raises SchemaError for one that is none of those it holds,
    ClaimError where its claimed bytes cannot be had."""
    if record.value is None:
        raise CorruptRecord("a tombstone where every record is kept")
    data = resolve(record).value or b""
    name, fields = decode(data)
    kinds = HOLDS[kind]
    if name not in kinds:
        raise CorruptRecord(f"a {name} where a {kinds[0]} belongs")
    return Row(record, name, fields, data, kind)
