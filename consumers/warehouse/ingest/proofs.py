"""Rows of the warehouse's own tables: what could not be read, and what was written."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Self

import xxhash
from fastavro import parse_schema, writer

from millrace.consumers.warehouse.ingest.avro_file import millis
from millrace.consumers.warehouse.ingest.blocks import Block
from millrace.consumers.warehouse.ingest.topic_identity import tip_of
from millrace.consumers.warehouse.store.base import Insertion, Store
from millrace.consumers.warehouse.store.columns import Column, backtick
from millrace.consumers.warehouse.store.fences import Fence, Where
from millrace.consumers.warehouse.store.tables import BLOCKS, LOG, UNREADABLE
from millrace.infra.log.base import Record
from millrace.schemas.ids import now_micros

AT_ONCE = 64
"""partitions that one statement about `blocks` names"""


class Proof(NamedTuple):
    """One row of `blocks`."""

    table: str
    topic: str
    part: int
    first: int
    last: int
    rows: int
    digest: str
    written: int
    tip: str

    @classmethod
    def of(cls, table: str, block: Block, rows: Sequence[bytes]) -> Self:
        """The proof of rows of a block."""
        digest = xxhash.xxh3_128()
        for row in rows:
            digest.update(row)
        last = block.until - 1
        now, tip = now_micros() // 1000, tip_of(block.records[-1])
        return cls(table, block.topic, block.part, block.first, last, len(rows), digest.hexdigest(), now, tip)


def proof_rows(proofs: Sequence[Proof]) -> tuple[Insertion, list[bytes]]:
    """What `Store.insert` takes for these proofs."""
    return _rows("blocks", BLOCKS, (proof._asdict() for proof in proofs))


def write_proofs(store: Store, proofs: Sequence[Proof], fences: Mapping[Where, Fence], query_id: str) -> None:
    """Write proofs, where several processes write those of each partition while it is its holder's. A statement names
    `AT_ONCE` partitions at most: an engine takes none that is too long."""
    if not store.is_shared:
        store.insert(*proof_rows(proofs), query_id)
        return
    partitions = sorted({(proof.topic, proof.part) for proof in proofs})
    for first in range(0, len(partitions), AT_ONCE):
        some = partitions[first : first + AT_ONCE]
        into, pieces = proof_rows([proof for proof in proofs if (proof.topic, proof.part) in some])
        where = " AND ".join(fences[one].condition for one in some)
        store.insert(replace(into, where=where), pieces, f"{query_id}-{first}")


def unreadable_rows(records: Sequence[tuple[Record, str]]) -> tuple[Insertion, list[bytes]]:
    """What `Store.insert` takes for records that cannot be read, with the reasons."""
    return _rows("unreadable", UNREADABLE, (_unreadable(record, reason) for record, reason in records))


def _unreadable(record: Record, reason: str) -> Mapping[str, Any]:
    place = {"topic": record.topic, "part": record.partition, "off": record.offset}
    return {**place, "logged": millis(record.timestamp), "reason": reason, "size": len(record.value or b"")}


def _rows(name: str, columns: Sequence[Column], rows: Iterable[Mapping[str, Any]]) -> tuple[Insertion, list[bytes]]:
    """Rows as Avro; whatever is no string is a long."""
    kinds = {column.name: "string" if "String" in column.type else "long" for column in columns}
    fields = [{"name": column, "type": kind} for column, kind in kinds.items()]
    out = io.BytesIO()
    writer(out, parse_schema({"type": "record", "name": "Row", "fields": fields}), rows)
    names = tuple(kinds)
    structure = ", ".join(f"{backtick(column.name)} {column.type}" for column in columns)
    return Insertion(f"{LOG}.{name}", names, tuple(map(backtick, names)), structure), [out.getvalue()]
