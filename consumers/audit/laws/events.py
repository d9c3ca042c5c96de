"""Laws about `events`: each event is its raw event with what refine added, and two hash chains over them hold, refine's
per slot and the gateway's per trajectory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import combinations
from operator import eq, itemgetter
from typing import Any

from millrace.consumers.audit.facts import Facts
from millrace.consumers.audit.law import INELIGIBLE, Law
from millrace.infra.log.history.rows import Mark, Row
from millrace.infra.log.topics import partition_of
from millrace.schemas.chain import START, event_hash
from millrace.schemas.records import Event
from millrace.schemas.registry import current

REFINE_FIELDS = ("log_time", "source_place", "source_hash", "governance")
"""fields that are empty in raw and that refine fills"""
CHANGING_FIELDS = frozenset({*REFINE_FIELDS, "prev_hash", "hash", "hash_version", "body"})
"""fields that differ between a raw event and its event"""
CAPTURED_FIELDS = tuple(f["name"] for f in current("Event").definition["fields"] if f["name"] not in CHANGING_FIELDS)
"""fields that an event has of its raw event"""
HEADER_FIELDS = ("policy", "group", "trajectory", "id", "kind")
"""what the headers of an event repeat of it"""
_captured_values: Callable[[Any], tuple[Any, ...]] = itemgetter(*CAPTURED_FIELDS)
REPLACEMENT = re.compile(r"redacted-[a-p]{32}")
"""what stands for a name that held a secret"""


def is_unaltered(before: Any, after: Any) -> bool:
    """Whether a value went through refine as it was captured, but for names in it that were replaced as a whole."""
    if before == after:
        return True
    match before, after:
        case str(), str():
            return REPLACEMENT.fullmatch(after) is not None
        case dict(), dict():
            return is_unaltered(list(before.items()), list(after.items()))
        case ((list() | tuple()), (list() | tuple())):
            return len(before) == len(after) and all(map(is_unaltered, before, after))
    return False


def is_redacted(row: Row[Event]) -> bool:
    """Whether the governance of an event says that something was taken out of it."""
    governance = row["governance"]
    return governance is not None and governance["redaction"] in ("applied", "failed")


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
        self._rules: tuple[bytes, tuple[str, str], Mark] | None = None

    def raw(self, row: Row[Event]) -> None:
        record: Mapping[str, Any] = row.record
        names = [name for name in REFINE_FIELDS if record[name] is not None]
        if names:
            self.fail(f"a raw event says {', '.join(names)}, which refine alone decides", row, event=row["id"])
        digest = _digest(row["body"])
        self._raw[row.place.offset] = (_captured_values(record), digest, row["hash_version"], row.mark)

    def event(self, row: Row[Any]) -> None:
        if row.name != "Event":
            if row["slot"] != row.place.partition or row["stage"] != "refine":
                self.fail("progress of another slot or stage lies here", row)
            return
        self._turn(row)
        headers = row.raw.headers
        wrong = [name for name in HEADER_FIELDS if name in headers and headers[name] != row[name].encode()]
        if wrong:
            self.fail(f"an event's headers say another {', '.join(wrong)}", row, event=row["id"])
        if row.raw.key != f"{row['tenant']}/{row['group']}".encode():
            self.fail(f"an event lies under key {row.raw.key!r}", row, event=row["id"])
        if row.place.partition != partition_of(row.raw.key, len(self.facts.starts["events"])):
            self.fail("an event lies on another partition than its key's", row, event=row["id"])
        self._check_redaction(row)
        place = row["source_place"]
        raw = self._raw.pop(place["offset"], None) if place else None
        if raw is None:
            return
        self.finding.checked += 1
        values, body, version, mark = raw
        if values != (event_values := _captured_values(row.record)):
            is_equal = is_unaltered if is_redacted(row) else eq
            fields = [f for f, *pair in zip(CAPTURED_FIELDS, values, event_values, strict=True) if not is_equal(*pair)]
            if fields:
                self.fail(f"an event differs from its raw event in {', '.join(fields)}", mark, row, event=row["id"])
        if row["hash_version"] < version:
            self.fail("an event has an older kind of hash than its raw event", mark, row, event=row["id"])
        if body != _digest(row["body"]) and not self._may_differ(row):
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

    def _check_redaction(self, row: Row[Event]) -> None:
        governance = row["governance"]
        if governance is None or governance["redaction"] != "failed":
            return
        if governance["eligibility"] not in INELIGIBLE:
            self.fail("an event whose redaction failed may be learned from", row, event=row["id"])

    def _may_differ(self, row: Row[Event]) -> bool:
        governance = row["governance"]
        if governance is None:
            return True
        return governance["redaction"] != "none_needed" or governance["eligibility"] in INELIGIBLE

    def slot_end(self, partition: int) -> None:
        self._raw.clear()
        self._rules = None


class EventsChain(Law):
    """refine links all events of a slot; the link covers the stored body, so any change of a record breaks it."""

    name = "events-chain"
    sentence = "the hash chain over the events of each slot is unbroken"
    unit = "links"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._last: tuple[bytes, Mark] | None = None
        self._rules = RulesBySlot()

    def event(self, row: Row[Event]) -> None:
        if row.name != "Event":
            return
        self.finding.checked += 1
        if event_hash(row["prev_hash"], row.record) != row["hash"]:
            self.fail("an event does not have the hash of what is stored: it was changed", row, event=row["id"])
        if self._last is not None:
            if row["prev_hash"] != self._last[0]:
                message = "an event does not name the hash of the one before it: something was taken out or put in"
                self.fail(message, self._last[1], row, event=row["id"])
        elif row["prev_hash"] != START and not self.facts.starts["events"].get(row.place.partition):
            self.fail("the first event of a slot names one before it", row, event=row["id"])
        self._last = (row["hash"], row.mark)
        if row["governance"] is not None and row["log_time"] is not None:
            self._rules.see(row.place.partition, row["governance"]["policy_version"], row["log_time"])

    def slot_end(self, partition: int) -> None:
        self._last = None

    def finish(self) -> None:
        for slot, peer in self._rules.clashes():
            self.note(
                f"slots {slot} and {peer} are governed by different rules: give every refine the same [governance]"
            )


class CaptureChain(Law):
    """What refine let through is what the gateway captured: per trajectory one chain over the raw events, and each
    governed event keeps the hash of its raw one. Judges number nothing and stand outside the chain."""

    name = "capture-chain"
    sentence = "the gateway's chain per trajectory is unbroken, and each event keeps its raw event's hash and identity"
    unit = "events"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._raw: dict[int, _RawEvent] = {}
        self._links: dict[str, _RawEvent] = {}
        self._unchecked = 0
        self._flagged = 0

    def raw(self, row: Row[Event]) -> None:
        intact = event_hash(row["prev_hash"], row.record) == row["hash"]
        self._raw[row.place.offset] = _RawEvent(
            row["id"],
            row["trajectory"],
            row["step"],
            row["source_seq"],
            row["prev_hash"],
            row["hash"],
            intact,
            row.mark,
        )

    def event(self, row: Row[Event]) -> None:
        """Comes after its raw event; what stays unnamed (duplicates, dead letters) is another law's."""
        if row.name != "Event" or row["source_place"] is None:
            return
        partition = partition_of(row.raw.key, len(self.facts.starts["events"]))
        if row.place.partition != partition:
            here = row.place.partition
            message = f"an event lies on partition {here}, its key {row.raw.key!r} belongs to {partition}"
            self.fail(message, row, event=row["id"])
        place = row["source_place"]
        raw = self._raw.pop(place["offset"], None)
        if raw is None:
            self._unchecked += place["offset"] < self.facts.starts["raw"].get(place["partition"], 0)
            return
        self.finding.checked += 1
        before, after = (raw.id, raw.trajectory), (row["id"], row["trajectory"])
        is_equal = is_unaltered(before, after) if is_redacted(row) else before == after
        if not is_equal or raw.step != row["step"]:
            message = f"an event is not the raw event that it names ({raw.id})"
            self.fail(message, raw.mark, row, event=row["id"])
        if not raw.intact:
            message = "a raw event that was let through does not have the hash of its bytes"
            self.fail(message, raw.mark, event=raw.id)
        if row["source_hash"] != raw.hash:
            self.fail("an event does not keep the hash of its raw event", raw.mark, row, event=row["id"])
        governance = row["governance"]
        if raw.source_seq is not None and governance is not None:  # the law about envelopes names it
            self._link(raw, is_flagged=governance["eligibility"] in INELIGIBLE)

    def _link(self, raw: _RawEvent, *, is_flagged: bool) -> None:
        """Compare with the link before. A break that refine flagged cannot train and is its disposition."""
        ids = {"trajectory": raw.trajectory, "event": raw.id}
        last = self._links.get(raw.trajectory)
        headless = self.facts.starts["raw"].get(raw.mark.place.partition, 0) > 0
        is_linked = raw.prev_hash == last.hash if last else headless or raw.prev_hash == START
        if not is_linked and is_flagged:
            self._flagged += 1
        elif not is_linked and last:
            message = f"event {raw.step} of a trajectory does not name the hash of event {last.step} before it"
            self.fail(message, last.mark, raw.mark, **ids)
        elif not is_linked:
            message = "the first event of a trajectory names one before it: its beginning is missing"
            self.fail(message, raw.mark, **ids)
        self._links[raw.trajectory] = raw

    def slot_end(self, partition: int) -> None:
        self._raw.clear()
        self._links.clear()

    def finish(self) -> None:
        if self._flagged:
            self.note(f"{self._flagged} breaks were flagged by refine: what follows them never trains")
        if self._unchecked:
            self.note(f"{self._unchecked} events came from raw events that retention has taken: the slot's chain holds")


@dataclass(frozen=True, slots=True)
class _RawEvent:
    """What is kept of a raw event until the event that names it comes."""

    id: str
    trajectory: str
    step: int
    source_seq: int | None
    prev_hash: bytes
    hash: bytes
    intact: bool
    mark: Mark


class RulesBySlot:
    """Rules are known by their digest (`Governance.policy_version`), times are log times."""

    def __init__(self) -> None:
        self._spans: dict[tuple[int, str], tuple[int, int]] = {}
        self._newest: dict[int, str] = {}

    def see(self, slot: int, rules: str, time: int) -> None:
        """A slot's next event was decided by these rules at this time."""
        first, _ = self._spans.get((slot, rules), (time, time))
        self._spans[slot, rules] = (first, time)
        self._newest[slot] = rules

    def clashes(self) -> Iterator[tuple[int, int]]:
        """Pairs of slots whose newest rules differ and were in force at the same time."""
        for (slot, rules), (peer, other_rules) in combinations(sorted(self._newest.items()), 2):
            (my_first, my_last), (their_first, their_last) = self._spans[slot, rules], self._spans[peer, other_rules]
            if rules != other_rules and my_first < their_last and their_first < my_last:
                yield slot, peer
