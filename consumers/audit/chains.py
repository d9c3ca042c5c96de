"""Laws about the two hash chains over events: refine's per slot of `events`, the gateway's per trajectory."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.consumers.audit.envelopes import kept, redacted
from millrace.consumers.audit.facts import Facts
from millrace.consumers.audit.law import Law
from millrace.consumers.audit.rows import Mark, Row
from millrace.consumers.audit.rules import RulesBySlot
from millrace.consumers.audit.samples import BARRED
from millrace.infra.log.topics import partition_of
from millrace.schemas.chain import START, event_hash
from millrace.schemas.records import Event


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
        for one, other in self._rules.clashes():
            self.note(
                f"slots {one} and {other} are governed by different rules: give every refine the same [governance]"
            )


class CaptureChain(Law):
    """What refine let through is what the gateway captured: per trajectory one chain over the raw events, and each
    governed event keeps the hash of its raw one. Judges number nothing and stand outside the chain."""

    name = "capture-chain"
    sentence = "the gateway's chain per trajectory is unbroken, and each event keeps its raw event's hash and identity"
    unit = "events"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._raw: dict[int, _Captured] = {}
        self._links: dict[str, _Captured] = {}
        self._unchecked = 0
        self._flagged = 0

    def raw(self, row: Row[Event]) -> None:
        intact = event_hash(row["prev_hash"], row.record) == row["hash"]
        self._raw[row.place.offset] = _Captured(
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
        wanted = partition_of(row.raw.key, len(self.facts.starts["events"]))
        if row.place.partition != wanted:
            message = f"an event lies on partition {row.place.partition}, its key {row.raw.key!r} belongs to {wanted}"
            self.fail(message, row, event=row["id"])
        place = row["source_place"]
        captured = self._raw.pop(place["offset"], None)
        if captured is None:
            self._unchecked += place["offset"] < self.facts.starts["raw"].get(place["partition"], 0)
            return
        self.finding.checked += 1
        mine, theirs = (captured.id, captured.trajectory), (row["id"], row["trajectory"])
        same = kept(mine, theirs) if redacted(row) else mine == theirs
        if not same or captured.step != row["step"]:
            message = f"an event is not the raw event that it names ({captured.id})"
            self.fail(message, captured.mark, row, event=row["id"])
        if not captured.intact:
            message = "a raw event that was let through does not have the hash of its bytes"
            self.fail(message, captured.mark, event=captured.id)
        if row["source_hash"] != captured.hash:
            self.fail("an event does not keep the hash of its raw event", captured.mark, row, event=row["id"])
        governance = row["governance"]
        if captured.source_seq is not None and governance is not None:  # the law about envelopes names it
            self._link(captured, flagged=governance["eligibility"] in BARRED)

    def _link(self, captured: _Captured, *, flagged: bool) -> None:
        """Compare with the link before. A break that refine flagged cannot train and is its disposition."""
        ids = {"trajectory": captured.trajectory, "event": captured.id}
        last = self._links.get(captured.trajectory)
        headless = self.facts.starts["raw"].get(captured.mark.place.partition, 0) > 0
        whole = captured.prev_hash == last.hash if last else headless or captured.prev_hash == START
        if not whole and flagged:
            self._flagged += 1
        elif not whole and last:
            message = f"event {captured.step} of a trajectory does not name the hash of event {last.step} before it"
            self.fail(message, last.mark, captured.mark, **ids)
        elif not whole:
            message = "the first event of a trajectory names one before it: its beginning is missing"
            self.fail(message, captured.mark, **ids)
        self._links[captured.trajectory] = captured

    def slot_end(self, partition: int) -> None:
        self._raw.clear()
        self._links.clear()

    def finish(self) -> None:
        if self._flagged:
            self.note(f"{self._flagged} breaks were flagged by refine: what follows them never trains")
        if self._unchecked:
            self.note(f"{self._unchecked} events came from raw events that retention has taken: the slot's chain holds")


@dataclass(frozen=True, slots=True)
class _Captured:
    """What is kept of a raw event until the event that names it comes."""

    id: str
    trajectory: str
    step: int
    source_seq: int | None
    prev_hash: bytes
    hash: bytes
    intact: bool
    mark: Mark
