"""Laws about groups: each is resolved once, and each that is ready is trained on once, in the order of its seq."""

from __future__ import annotations

from typing import NamedTuple

from millrace.consumers.audit.facts import Facts
from millrace.consumers.audit.law import Law
from millrace.infra.log.base import Place
from millrace.infra.log.history.rows import Mark, Row
from millrace.schemas.records import LedgerEntry, Resolution


class _ReadyGroup(NamedTuple):
    ticket: int | None
    group: str
    places: tuple[Place, ...]
    mark: Mark


class ConsumedOnce(Law):
    """The order of learning: ready seqs are dense, and the ledger consumes each once, as it was resolved."""

    name = "consumed-once"
    sentence = "ready seqs are dense, and each ready group is in exactly one version with its ticket and places"
    unit = "ready groups"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._trained: dict[int, tuple[int, _ReadyGroup, str | None]] = {}
        self._ready: dict[int, Mark] = {}
        self._next: int | None = None
        self._lost = 0
        self._seq_hi = 0

    def ledger(self, row: Row[LedgerEntry]) -> None:
        self._seq_hi = max(self._seq_hi, row["seq_hi"])
        if row["version"] in self.facts.selected:
            return
        for group in row["groups"]:
            places = tuple(Place(p["topic"], p["partition"], p["offset"]) for p in group["trajectories"])
            entry = _ReadyGroup(group["ticket"], group["group"], places, row.mark)
            seq, version = group["seq"], row["version"]
            if seq in self._trained:
                first_version, first, _ = self._trained[seq]
                message = f"seq {seq} is in version {version} and in version {first_version}"
                self.fail(message, first.mark, row, seq=seq, group=entry.group)
            else:
                self._trained[seq] = (version, entry, group["lost"])
            self._lost += group["lost"] is not None

    def resolution(self, row: Row[Resolution]) -> None:
        if row["kind"] != "ready":
            if row["seq"] is not None:
                self.fail(f"a {row['kind']} group carries seq {row['seq']}", row, group=row["group"])
            return
        self.finding.checked += 1
        seq = row["seq"]
        if seq is None:
            self.fail("a ready group carries no seq", row, group=row["group"])
            return
        ready_group = _ReadyGroup(row["ticket"], row["group"], tuple(row.places()), row.mark)
        if seq in self._ready:
            self.fail(f"two ready groups carry seq {seq}", self._ready[seq], row, seq=seq, group=ready_group.group)
            return
        if self._next is None:
            self._next = 0 if self.facts.begins_at_zero("resolutions") else seq
        if seq != self._next:
            self.fail(f"ready seq {seq} follows {self._next - 1}", row, seq=seq, group=ready_group.group)
        self._next = seq + 1
        self._ready[seq] = row.mark
        self._compare(seq, ready_group)

    def _compare(self, seq: int, ready_group: _ReadyGroup) -> None:
        pair = self._trained.get(seq)
        if pair is None:
            if seq < self._seq_hi and self.facts.begins_at_zero("ledger"):
                message = f"ready seq {seq} lies below the ledger's end but is in no version"
                self.fail(message, ready_group.mark, seq=seq, group=ready_group.group)
            return
        version, entry, _ = pair
        for field in ("ticket", "group", "places"):
            if getattr(entry, field) != getattr(ready_group, field):
                message = f"version {version} trained seq {seq} with another {field} than it was resolved with"
                self.fail(message, ready_group.mark, entry.mark, seq=seq, group=ready_group.group)

    def finish(self) -> None:
        first = min(self._ready, default=0)
        for seq, (version, entry, _) in self._trained.items():
            if seq not in self._ready and (seq >= first or self.facts.begins_at_zero("resolutions")):
                message = f"version {version} trained seq {seq}, which no resolution made ready"
                self.fail(message, entry.mark, seq=seq, group=entry.group)
        self.finding.facts |= {"trained": len(self._trained), "lost": self._lost}
        self.finding.facts["waiting"] = sum(seq >= self._seq_hi for seq in self._ready)
        if self._lost:
            self.note(f"{self._lost} ready groups could not be read any more and were consumed as masked")


class ResolvedOnce(Law):
    """A ticket ends once, whatever arrives late; so does a group."""

    name = "resolved-once"
    sentence = "no ticket and no group is resolved twice"
    unit = "resolutions"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._tickets: dict[int, Mark] = {}
        self._groups: dict[str, Mark] = {}

    def resolution(self, row: Row[Resolution]) -> None:
        if row["kind"] == "setting":
            return
        self.finding.checked += 1
        ticket, group, mark = row["ticket"], row["group"], row.mark
        if ticket is not None and (first := self._tickets.setdefault(ticket, mark)) is not mark:
            self.fail(f"ticket {ticket} is resolved a second time", first, mark, ticket=ticket, group=group)
        elif group and (first := self._groups.setdefault(group, mark)) is not mark:
            self.fail(f"group {group} is resolved a second time", first, mark, group=group)
