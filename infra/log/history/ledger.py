"""The ledger of a policy: which ready groups trained which version, chained by hashes.

Invariants: versions are dense from 0, ranges tile (`seq_lo` is the parent's `seq_hi`), and `hash` is the sha256 over
`prev_hash` and the entry's stored bytes with `hash` empty. It is computed with the writer's own schema, so an entry
written by an older release keeps its hash forever.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Iterator
from typing import Any, cast

from fastavro import schemaless_reader, schemaless_writer

from millrace.infra.errors import LedgerError
from millrace.infra.log.base import Bus, Record
from millrace.infra.log.history.kinds import LEDGER, WEIGHTS
from millrace.infra.log.history.reader import History
from millrace.schemas import codec
from millrace.schemas.errors import SchemaError
from millrace.schemas.records import LedgerEntry
from millrace.schemas.registry import by_fingerprint


def entry_hash(entry: LedgerEntry) -> bytes:
    """The hash that belongs into `entry` (32 bytes); its own `hash` is ignored."""
    return hashlib.sha256(entry["prev_hash"] + codec.encode("LedgerEntry", {**entry, "hash": b""})).digest()


def stored_hash(value: bytes) -> bytes:
    """The hash that belongs into the entry stored as `value`, under the schema that wrote it (32 bytes)."""
    codec.decode_as("LedgerEntry", value)
    writer = by_fingerprint(value[2 : codec.HEAD])
    entry = cast(dict[str, Any], schemaless_reader(io.BytesIO(value[codec.HEAD :]), writer.avro, None))
    out = io.BytesIO()
    out.write(value[: codec.HEAD])
    schemaless_writer(out, writer.avro, {**entry, "hash": b""})
    return hashlib.sha256(entry["prev_hash"] + out.getvalue()).digest()


def chain_entry(entry: LedgerEntry, previous: bytes) -> LedgerEntry:
    """The entry with its place in the chain: `previous` is the parent's hash, empty for version 0."""
    link: LedgerEntry = {**entry, "prev_hash": previous, "hash": b""}
    link["hash"] = entry_hash(link)
    return link


def entries(records: Iterable[Record]) -> Iterator[LedgerEntry]:
    """The ledger's records in order, each checked against its parent.

    Raises LedgerError naming the first record that is no entry, or breaks a hash, the chain, the order of versions or
    the tiling. The first record may be any version, where older ones are not given."""
    parent: LedgerEntry | None = None
    for record in records:
        value, place = record.value or b"", f"{record.topic}/{record.partition}@{record.offset}"
        try:
            entry = codec.decode_as("LedgerEntry", value)
        except SchemaError as error:
            raise LedgerError(f"the record at {place} is no ledger entry ({error}); audit the policy") from error
        at = f"ledger entry of version {entry['version']} at {place}"
        if stored_hash(value) != entry["hash"]:
            raise LedgerError(f"{at} does not have the hash of its bytes: it was changed; audit the policy")
        fault = _against(parent, entry)
        if fault:
            raise LedgerError(f"{at} {fault}; audit the policy before it trains on")
        yield entry
        parent = entry


def read(bus: Bus, topic: str) -> Iterator[LedgerEntry]:
    """The entries of a policy's ledger, from the first that is kept. Raises LedgerError like `entries`."""
    return entries(bus.read(topic, 0, bus.starts(topic)[0]))


def digests(history: History) -> dict[int, str]:
    """The digest of each version of a policy: the ledger's, where it names one, else that of its first weight event."""
    event_digests, ledger_digests = dict[int, str](), dict[int, str]()
    for event in history.rows(WEIGHTS):
        event_digests.setdefault(event["version"], event["digest"])
    for entry in history.rows(LEDGER):
        ledger_digests.setdefault(entry["version"], entry["digest"])
    return {**event_digests, **ledger_digests}


def _against(parent: LedgerEntry | None, entry: LedgerEntry) -> str | None:
    """What is wrong with an entry that follows `parent`."""
    if entry["seq_hi"] < entry["seq_lo"]:
        return f"has the range {entry['seq_lo']}..{entry['seq_hi']}, which ends before it begins"
    if parent is None:
        return "is version 0 but names a parent's hash" if entry["version"] == 0 and entry["prev_hash"] else None
    if entry["version"] != parent["version"] + 1:
        return f"follows version {parent['version']}"
    if entry["seq_lo"] != parent["seq_hi"]:
        return f"begins at seq {entry['seq_lo']}, but its parent ended at {parent['seq_hi']}"
    if entry["prev_hash"] != parent["hash"]:
        return "does not name the hash of its parent"
    return None
