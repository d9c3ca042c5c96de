"""The newest version of a policy, or one by its number: its weight event and its ledger entry, which one transaction
wrote."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from millrace.infra.errors import LedgerError
from millrace.infra.log.base import Bus, Record
from millrace.infra.log.history.ledger import entries, stored_hash
from millrace.infra.log.newest import last
from millrace.infra.log.readable import readable
from millrace.schemas import codec
from millrace.schemas.records import LedgerEntry, WeightVersion

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


def head(bus: Bus, weights: str, ledger: str, patience_s: float | None = None) -> Head | None:
    """The newest committed version of a policy by its two full topic names; None before version 0.

    Without a fence a newer version may be committed meanwhile: what is returned belongs together all the same. One
    transaction writes both topics, but each partition gets a commit marker of its own, so for a moment a reader may see
    only one of them: up to `patience_s` seconds, MARKERS_S unless told, are spent on that. Raises LedgerError when they
    still disagree."""
    longest = MARKERS_S if patience_s is None else patience_s
    retrying = Retrying(
        retry=retry_if_exception_type(_Apart), stop=stop_after_delay(longest), wait=wait_fixed(0.05), reraise=True
    )
    return retrying(_head, bus, weights, ledger)


class _Apart(LedgerError):
    """The two topics do not show the same version, or not yet."""


def _head(bus: Bus, weights: str, ledger: str) -> Head | None:
    record = last(bus, ledger, _is_entry)
    if record is None:
        return None
    entry = next(iter(entries([record])))
    event = _event_of(bus, weights, entry)
    if event is None:
        raise _Apart(
            f"{ledger} ends with version {entry['version']} and digest {entry['digest'][:12]}, which {weights} does "
            "not hold: they were not written together; audit the policy"
        )
    return Head(event, entry)


def older(bus: Bus, weights: str, ledger: str, version: int) -> Head | None:
    """A committed version of a policy by its two full topic names; None where one of them does not hold it."""
    record = last(bus, ledger, _entry_of(version))
    if record is None:
        return None
    entry = codec.decode_as("LedgerEntry", record.value or b"")
    event = _event_of(bus, weights, entry)
    return None if event is None else Head(event, entry)


def _event_of(bus: Bus, weights: str, entry: LedgerEntry) -> WeightVersion | None:
    record = last(bus, weights, _event_with(entry["version"], entry["digest"]))
    return None if record is None else codec.decode_as("WeightVersion", record.value or b"")


def _event_with(version: int, digest: str) -> Callable[[Record], bool]:
    """Whether a record is the weight event of a version with its digest. Nobody else's bytes hide it, and no event of
    the same number that the ledger does not name."""

    def is_event(record: Record) -> bool:
        event = readable(WeightVersion, record)
        return event is not None and (event["version"], event["digest"]) == (version, digest)

    return is_event


def _entry_of(version: int) -> Callable[[Record], bool]:
    """Whether a record is the ledger entry of a version, with the hash of its bytes. Nobody else's bytes hide it."""

    def is_entry(record: Record) -> bool:
        entry = readable(LedgerEntry, record)
        if entry is None or entry["version"] != version:
            return False
        return stored_hash(record.value or b"") == entry["hash"]

    return is_entry


def _is_entry(record: Record) -> bool:
    return readable(LedgerEntry, record) is not None
