"""The law that refine only added to what was captured: an event is its raw event, governed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from millrace.consumers.audit.facts import Facts
from millrace.consumers.audit.law import Law
from millrace.consumers.audit.rows import Mark, Row
from millrace.infra.log.topics import partition_of
from millrace.schemas.records import Event

ADDED = frozenset({"log_time", "source_place", "source_hash", "governance"})
"""fields that are empty in raw and that refine fills"""
OWN = ADDED | {"prev_hash", "hash", "hash_version", "body"}
"""fields that differ between a raw event and its event"""
REPLACED = re.compile(r"redacted-[a-p]{32}")
"""what stands for a name that held a secret"""
BARRED = frozenset({"denied", "audit_only"})


def kept(captured: Any, stored: Any) -> bool:
    """Whether a value went through refine as it was captured, but for names in it that were replaced as a whole."""
    if captured == stored:
        return True
    match captured, stored:
        case str(), str():
            return REPLACED.fullmatch(stored) is not None
        case dict(), dict():
            return kept(list(captured.items()), list(stored.items()))
        case ((list() | tuple()), (list() | tuple())):
            return len(captured) == len(stored) and all(map(kept, captured, stored))
    return False


def redacted(row: Row[Event]) -> bool:
    """Whether the governance of an event says that something was taken out of it."""
    governance = row["governance"]
    return governance is not None and governance["redaction"] in ("applied", "failed")


def _headed(row: Row[Event]) -> dict[str, str]:
    """What the headers of an event repeat of it."""
    names = {"policy": row["policy"], "group": row["group"], "trajectory": row["trajectory"]}
    return {"id": row["id"], "kind": row["kind"], **names}


def _digest(body: bytes) -> bytes:
    return blake2b(body, digest_size=16).digest()


class Envelopes(Law):
    """Everything around the body goes through refine as it was captured, but for names that held a secret; the body
    too, unless something was redacted, withheld or denied. The event's governance says each."""

    name = "envelopes"
    sentence = "each event is its raw event with refine's fields added, and one turn governs by one set of rules"
    unit = "events"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._raw: dict[int, tuple[tuple[Any, ...], bytes, int, Mark]] = {}
        """envelope, digest of the body (what has no event would keep all of it), kind of hash"""
        self._fields: tuple[str, ...] = ()
        self._rules: tuple[bytes, tuple[str, str], Mark] | None = None

    def raw(self, row: Row[Event]) -> None:
        said: Mapping[str, Any] = row.record
        filled = [name for name, value in said.items() if name in ADDED and value is not None]
        if filled:
            self.fail(f"a raw event says {', '.join(filled)}, which refine alone decides", row, event=row["id"])
        self._fields = self._fields or tuple(sorted(row.record.keys() - OWN))
        self._raw[row.place.offset] = (
            tuple(said[field] for field in self._fields),
            _digest(row["body"]),
            row["hash_version"],
            row.mark,
        )

    def event(self, row: Row[Any]) -> None:
        if row.name != "Event":
            if row["slot"] != row.place.partition or row["stage"] != "refine":
                self.fail("progress of another slot or stage lies here", row)
            return
        self._turn(row)
        headers = {name: said.encode() for name, said in _headed(row).items()}
        wrong = [name for name, value in headers.items() if row.raw.headers.get(name, value) != value]
        if wrong:
            self.fail(f"an event's headers say another {', '.join(wrong)}", row, event=row["id"])
        if row.raw.key != f"{row['tenant']}/{row['group']}".encode():
            self.fail(f"an event lies under key {row.raw.key!r}", row, event=row["id"])
        if row.place.partition != partition_of(row.raw.key, len(self.facts.starts["events"])):
            self.fail("an event lies on another partition than its key's", row, event=row["id"])
        self._governed(row)
        place = row["source_place"]
        captured = self._raw.pop(place["offset"], None) if place else None
        if captured is None:
            return
        self.finding.checked += 1
        values, body, version, mark = captured
        same = kept if redacted(row) else lambda one, other: bool(one == other)
        other = [f for f, value in zip(self._fields, values, strict=True) if not same(value, row[f])]
        if other:
            self.fail(f"an event differs from its raw event in {', '.join(other)}", mark, row, event=row["id"])
        if row["hash_version"] < version:
            self.fail("an event has an older kind of hash than its raw event", mark, row, event=row["id"])
        if body != _digest(row["body"]) and not self._changed(row):
            self.fail(
                "an event's body differs from its raw event's, and nothing was redacted", mark, row, event=row["id"]
            )

    def _turn(self, row: Row[Event]) -> None:
        """One process folds a turn, and a process has one set of rules."""
        governance = row["governance"]
        if governance is None:
            self.fail("an event was not governed", row, event=row["id"])
            return
        rules = (governance["policy_version"], governance["redaction_version"])
        turn = row.raw.headers.get("turn", b"")
        if self._rules is not None and self._rules[0] == turn and self._rules[1] != rules:
            self.fail("one turn governed its events by two sets of rules", self._rules[2], row, event=row["id"])
        self._rules = (turn, rules, row.mark)

    def _governed(self, row: Row[Event]) -> None:
        governance = row["governance"]
        if governance is not None and governance["redaction"] == "failed" and governance["eligibility"] not in BARRED:
            self.fail("an event whose redaction failed may be learned from", row, event=row["id"])

    def _changed(self, row: Row[Event]) -> bool:
        governance = row["governance"]
        if governance is None:
            return True
        return governance["redaction"] != "none_needed" or governance["eligibility"] in BARRED

    def slot_end(self, partition: int) -> None:
        self._raw.clear()
        self._rules = None
