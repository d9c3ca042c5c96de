"""Which table a record goes to, and as which bytes. Pure, but for claims, whose bytes lie elsewhere.

Invariants: a record becomes one row of one table, or is named with the reason why not; a tombstone of a compacted topic
is neither. What this release wrote is not decoded; what an older one wrote is written anew with today's schema.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

from millrace.consumers.warehouse.ingest.avro_file import BRANCH, NO_BODY, split_plain_event, with_place
from millrace.consumers.warehouse.store.tables import RecordTable, table_of
from millrace.infra.errors import ClaimError, StorageError
from millrace.infra.log.base import Record
from millrace.infra.log.history.kinds import HOLDS, TURNS, WORKERS
from millrace.schemas import codec
from millrace.schemas.errors import CorruptRecord, SchemaError, UnknownSchema
from millrace.schemas.registry import current

Behind = Callable[[bytes], bytes]
"""gives the bytes behind a claim, as `ClaimStore.behind`"""


@dataclass(slots=True)
class TableRow:
    """What became of some records: rows by table, each with its offset, and what cannot be read, with the reason."""

    rows: dict[RecordTable, list[tuple[int, bytes]]] = field(default_factory=dict)
    unreadable: list[tuple[Record, str]] = field(default_factory=list)


class TableChooser:
    """Sorts records of one kind of topic (`infra.log.history.kinds`)."""

    def __init__(self, kind: str, behind: Behind) -> None:
        self._behind = behind
        self._forgets = kind == WORKERS
        self._tables = {name: table for name in HOLDS[kind] if (table := table_of(kind, name))}
        self._heads = {codec.MARK + current(name).fingerprint: table for name, table in self._tables.items()}

    def sort(self, records: list[Record]) -> TableRow:
        """Rows of records. Raises StorageError where the bytes behind a claim cannot be had now."""
        outcome = TableRow()
        for record in records:
            value = record.value
            try:
                if value is None:
                    if not self._forgets:
                        raise CorruptRecord("a tombstone where every record is kept")
                    continue
                table, row = self._row(record, value)
            except StorageError:
                raise
            except UnknownSchema as error:
                reason = f"{error}; after an upgrade `millrace warehouse rebuild` takes it in"
                outcome.unreadable.append((record, reason))
            except (SchemaError, ClaimError) as error:
                outcome.unreadable.append((record, str(error)))
            else:
                outcome.rows.setdefault(table, []).append((record.offset, row))
        return outcome

    def _row(self, record: Record, value: bytes) -> tuple[RecordTable, bytes]:
        table = self._heads.get(value[: codec.HEAD])
        if table is None:
            value = self._behind(value)
            name = codec.name_of(value)
            if name not in self._tables:
                raise CorruptRecord(f"a {name} where a {next(iter(self._tables))} belongs")
            table = self._tables[name]
            value = rewrite_newest(name, value)
        place = with_place(record.offset, record.timestamp)
        if table.record != "Event":
            return table, place + value[codec.HEAD :]
        return table, b"".join((place, *(split_plain_event(value) or split_event(value))))


def rewrite_newest(name: str, value: bytes) -> bytes:
    """The bytes of a record under today's schema. Raises SchemaError for what cannot be read."""
    if value.startswith(codec.MARK + current(name).fingerprint):
        return value
    return codec.encode_by_name(name, codec.decode_by_name(name, value))


def split_event(value: bytes) -> tuple[bytes, bytes, bytes]:
    """As `opened`, for any body: one of an older release under today's schema, none where it is sealed. Raises
    SchemaError for a body that cannot be read."""
    event = codec.decode_as("Event", value)
    body = event["body"]
    envelope = codec.encode("Event", {**event, "body": b""})[codec.HEAD : -1]
    if event["body_encoding"] == "sealed":
        return envelope, NO_BODY, b""
    body = rewrite_newest(codec.name_of(body), body)
    branch = BRANCH.get(body[: codec.HEAD])
    if branch is None:
        raise CorruptRecord(f"a {codec.name_of(body)} where the body of an event belongs")
    return envelope, branch, body[codec.HEAD :]


@cache
def kind_of(topic: str) -> str | None:
    """The kind of a topic, by its name without the namespace; None for changelogs and for what is no topic of
    Millrace."""
    first, _, rest = topic.partition(".")
    if first == "turns":
        return next((kind for kind in TURNS if f".{rest}".endswith(f".{kind.partition('.')[2]}")), None)
    if first == "changelog":
        return None
    name = topic.rpartition(".")[2]
    return name if name in HOLDS else None
