"""Laws about the order of learning: groups and tickets are granted once, resolved once, trained once and counted; B and
eta change exactly where dispatch wrote that they do."""

from __future__ import annotations

import uuid
from collections import Counter
from typing import NamedTuple

from millrace.consumers.audit.facts import Facts
from millrace.consumers.audit.law import Law
from millrace.infra.log.base import Place
from millrace.infra.log.history.rows import Mark, Row
from millrace.infra.stages.decisions import AUTHOR, id_of, key_of
from millrace.schemas.records import Decision, Grant, LedgerEntry, Resolution


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


class Tickets(Law):
    """Admission loses nothing: every ticket was granted (or given to an unsolicited group) once, and is either
    resolved or outstanding. Top-ups repeat a grant and are no new ticket."""

    name = "tickets"
    sentence = "tickets are dense, and granted = ready + negative + outstanding"
    unit = "tickets"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._granted: dict[int, tuple[Mark, tuple[object, ...], int]] = {}
        self._resolved: dict[int, tuple[str, bool, Mark]] = {}
        self._floor = 0
        self._heads: dict[int, int] = {}

    def resolution(self, row: Row[Resolution]) -> None:
        if row["kind"] == "setting" or row["ticket"] is None:
            return
        self._resolved.setdefault(row["ticket"], (row["kind"], row["solicited"], row.mark))

    def grant(self, row: Row[Grant]) -> None:
        ticket, partition = row["ticket"], row.place.partition
        if partition not in self._heads:
            self._heads[partition] = ticket
        count = len(self.facts.starts["grants"])
        if partition != ticket % count:
            self.fail(f"ticket {ticket} lies on partition {partition} of {count}", row, ticket=ticket)
        terms = (row["prompt_id"], row["group_size"], row["min_version"], row["deadline"])
        entry = self._granted.get(ticket)
        if entry is None:
            if row["round"] and not self.facts.starts["grants"].get(partition):
                self.fail(f"ticket {ticket} begins with round {row['round']}", row, ticket=ticket)
            self._granted[ticket] = (row.mark, terms, row["round"])
            return
        first, first_terms, rounds = entry
        if row["round"] != rounds + 1:
            message = f"ticket {ticket} is granted again in round {row['round']} after round {rounds}"
            self.fail(message, first, row, ticket=ticket)
        if terms != first_terms:
            self.fail(f"round {row['round']} of ticket {ticket} changes its terms", first, row, ticket=ticket)
        self._granted[ticket] = (first, first_terms, row["round"])

    def finish(self) -> None:
        for partition, start in self.facts.starts["grants"].items():
            if start:
                self._floor = max(self._floor, self._heads.get(partition, 0))
        if not self.facts.begins_at_zero("resolutions"):
            self._floor = max(self._floor, min(self._resolved, default=0))
        unsolicited_tickets = {t: entry for t, entry in self._resolved.items() if not entry[1]}
        for ticket, (_, _, mark) in unsolicited_tickets.items():
            if ticket in self._granted:
                message = f"ticket {ticket} was granted and given to an unsolicited group"
                self.fail(message, self._granted[ticket][0], mark, ticket=ticket)
        for ticket, (kind, is_solicited, mark) in self._resolved.items():
            if is_solicited and ticket not in self._granted and ticket >= self._floor:
                self.fail(f"ticket {ticket} is resolved as {kind} but was never granted", mark, ticket=ticket)
        self._dense(sorted({*self._granted, *unsolicited_tickets}))
        self._count(set(self._granted) | set(unsolicited_tickets))

    def _dense(self, tickets: list[int]) -> None:
        next_ticket = self._floor
        for ticket in tickets:
            if ticket < self._floor:
                continue
            if ticket != next_ticket:
                mark = self._granted[ticket][0] if ticket in self._granted else self._resolved[ticket][2]
                gap = f"ticket {next_ticket}" if ticket == next_ticket + 1 else f"tickets {next_ticket} to {ticket - 1}"
                self.fail(f"{gap} never existed, but {ticket} does", mark, ticket=next_ticket)
            next_ticket = ticket + 1

    def _count(self, tickets: set[int]) -> None:
        kinds = Counter(kind for ticket, (kind, _, _) in self._resolved.items() if ticket in tickets)
        ready_count = kinds.pop("ready", 0)
        negative_count = sum(kinds.values())
        self.finding.checked = len(tickets)
        self.finding.facts |= {"granted": len(tickets), "ready": ready_count, "negative": negative_count}
        self.finding.facts["outstanding"] = len(tickets) - ready_count - negative_count
        if self._floor:
            self.note(f"checked from ticket {self._floor} on: retention has taken earlier grants or resolutions")


UUID_BY_CLOCK, UUID_BY_NAME = 7, 5
"""versions of uuid: drawn at random by a clock, as older releases name their decisions; made of what is named"""


class Settings(Law):
    """B changes at a batch boundary, eta for new grants only; each grant's deadline is its min_version plus the eta of
    its ticket, and each change answers a decision. A decision that Millrace made is named for what it says."""

    name = "settings"
    sentence = "changes of B and eta hold from the seq and ticket that dispatch wrote, and grants obey them"
    unit = "grants and changes"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._changes: list[tuple[str, int, str | None, Mark]] = []
        self._grants: list[tuple[int, int, Mark]] = []
        self._decisions: set[str] = set()
        self._borders: set[int] = set()

    def ledger(self, row: Row[LedgerEntry]) -> None:
        self._borders.add(row["seq_hi"])

    def decision(self, row: Row[Decision]) -> None:
        self._decisions.add(row["id"])
        kind = _version(row["id"])
        if kind != UUID_BY_NAME and (kind == UUID_BY_CLOCK or row["author"] != AUTHOR):
            return  # named as somebody liked
        if row["id"] != id_of(row.record):
            self.fail("a decision says something else than it was made with", row, decision=row["id"])
        if row.raw.key != key_of(row.record):
            self.fail(f"a decision lies under key {row.raw.key!r}", row, decision=row["id"])

    def resolution(self, row: Row[Resolution]) -> None:
        setting = row["setting"]
        if row["kind"] != "setting":
            return
        self.finding.checked += 1
        if setting is None:
            self.fail("a change of settings that names no setting", row)
            return
        name = setting["name"]
        position = {"batch": setting["from_seq"], "eta": setting["from_ticket"]}.get(name, 0)
        if position is None:
            self.fail(f"a change of {name} does not say from where it holds", row, setting=name)
            return
        self._changes.append((name, position, setting["decision"], row.mark))

    def grant(self, row: Row[Grant]) -> None:
        self.finding.checked += 1
        if row["round"] == 0:
            eta = self.facts.eta.at(row["ticket"])
            if eta is not None and row["deadline"] - row["min_version"] != eta:
                message = (
                    f"ticket {row['ticket']} may wait until batch {row['deadline']} from version "
                    f"{row['min_version']}, where eta is {eta}"
                )
                self.fail(message, row, ticket=row["ticket"])

    def finish(self) -> None:
        last = max(self._borders, default=0)
        for name, position, decision, mark in self._changes:
            if name == "batch" and position <= last and position not in self._borders:
                self.fail(f"B changes at seq {position}, which is no batch boundary", mark, setting=name)
            if decision is not None and decision not in self._decisions and self.facts.begins_at_zero("decisions"):
                self.fail(f"a change of {name} names decision {decision}, which nobody made", mark, setting=name)


def _version(id: str) -> int | None:
    """Which kind of uuid an id is, None for what is none."""
    try:
        return uuid.UUID(id).version
    except ValueError:
        return None
