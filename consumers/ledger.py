"""The ledger of a policy: which ready groups trained which version, chained by hashes.

Invariants: versions are dense from 0, ranges tile (`seq_lo` is the parent's `seq_hi`), and `hash` is the sha256 over
`prev_hash` and the entry's stored bytes with `hash` empty. It is computed with the writer's own schema, so an entry
written by an older release keeps its hash forever.
"""

from __future__ import annotations

import hashlib
import io
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from fastavro import schemaless_reader, schemaless_writer
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from infra.bus.base import Bus, Record
from infra.errors import LedgerError
from schemas import codec
from schemas.records import LedgerEntry, WeightVersion
from schemas.registry import by_fingerprint

WINDOW = 64
"""records looked at first when only the last one of a topic is wanted; doubled while the window holds none"""
MARKERS_S = 20.0
"""longest that the parts of one committed transaction may become visible after each other"""


@dataclass(frozen=True, slots=True)
class Head:
    """The newest version and what trained it, written in one transaction."""

    weights: WeightVersion
    entry: LedgerEntry

    @property
    def version(self) -> int:
        return self.weights["version"]

    @property
    def seq_hi(self) -> int:
        """First ready seq that no committed version has trained on."""
        return self.entry["seq_hi"]


def entry_hash(entry: Mapping[str, Any]) -> bytes:
    """The hash that belongs into `entry` (32 bytes); its own `hash` is ignored."""
    return hashlib.sha256(entry["prev_hash"] + codec.encode("LedgerEntry", {**entry, "hash": b""})).digest()


def stored_hash(value: bytes) -> bytes:
    """The hash that belongs into the entry stored as `value`, under the schema that wrote it (32 bytes)."""
    codec.decode_as("LedgerEntry", value)
    writer = by_fingerprint(value[2 : codec.HEAD])
    entry = cast(dict[str, Any], schemaless_reader(io.BytesIO(value[codec.HEAD :]), writer.parsed, None))
    out = io.BytesIO()
    out.write(value[: codec.HEAD])
    schemaless_writer(out, writer.parsed, {**entry, "hash": b""})
    return hashlib.sha256(entry["prev_hash"] + out.getvalue()).digest()


def chained(entry: LedgerEntry, previous: bytes) -> LedgerEntry:
    """The entry with its place in the chain: `previous` is the parent's hash, empty for version 0."""
    linked: LedgerEntry = {**entry, "prev_hash": previous, "hash": b""}
    linked["hash"] = entry_hash(linked)
    return linked


def entries(records: Iterable[Record]) -> Iterator[LedgerEntry]:
    """The ledger's records in order, each checked against its parent.

    Raises LedgerError naming the first record that breaks a hash, the chain, the order of versions or the tiling. The
    first record may be any version, where older ones are not given."""
    parent: LedgerEntry | None = None
    for record in records:
        value = record.value or b""
        entry = cast(LedgerEntry, codec.decode_as("LedgerEntry", value))
        at = f"ledger entry of version {entry['version']} at {record.topic}/{record.partition}@{record.offset}"
        if stored_hash(value) != entry["hash"]:
            raise LedgerError(f"{at} does not have the hash of its bytes: it was changed; audit the policy")
        fault = _against(parent, entry)
        if fault:
            raise LedgerError(f"{at} {fault}; audit the policy before it trains on")
        yield entry
        parent = entry


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


def last(bus: Bus, topic: str, wanted: Callable[[Record], bool] = lambda _: True) -> Record | None:
    """The last committed record of a one-partition topic that is wanted, None when it holds none."""
    start, end = bus.starts(topic)[0], bus.ends(topic)[0]
    window = WINDOW
    while True:
        low = max(start, end - window)
        found = deque((record for record in bus.read(topic, 0, low, end) if wanted(record)), maxlen=1)
        if found or low == start:
            return found[0] if found else None
        window *= 2


def head(bus: Bus, weights: str, ledger: str, patience_s: float | None = None) -> Head | None:
    """The newest committed version of a policy by its two full topic names; None before version 0.

    Without a fence a newer version may be committed meanwhile: what is returned belongs together all the same. One
    transaction writes both topics, but each partition gets a commit marker of its own, so for a moment a reader may see
    only one of them: up to `patience_s` seconds, MARKERS_S unless told, are spent on that. Raises LedgerError when they
    still disagree."""
    longest = MARKERS_S if patience_s is None else patience_s
    again = Retrying(
        retry=retry_if_exception_type(_Apart), stop=stop_after_delay(longest), wait=wait_fixed(0.05), reraise=True
    )
    return again(_head, bus, weights, ledger)


class _Apart(LedgerError):
    """The two topics do not show the same version, or not yet."""


def _head(bus: Bus, weights: str, ledger: str) -> Head | None:
    record = last(bus, ledger)
    if record is None:
        return None
    entry = next(iter(entries([record])))
    other = last(bus, weights, lambda one: _weights_of(one)["version"] == entry["version"])
    version = _weights_of(other) if other is not None else None
    if version is None or version["digest"] != entry["digest"]:
        raise _Apart(
            f"{ledger} ends with version {entry['version']} and digest {entry['digest'][:12]}, which {weights} does "
            "not hold: they were not written together; audit the policy"
        )
    return Head(version, entry)


def _weights_of(record: Record) -> WeightVersion:
    return cast(WeightVersion, codec.decode_as("WeightVersion", record.value or b""))
