"""The law about tickets: they are granted without a gap, each once, and each is resolved or outstanding."""

from __future__ import annotations

from collections import Counter

from millrace.consumers.audit.facts import Facts
from millrace.consumers.audit.law import Law
from millrace.infra.log.history.rows import Mark, Row
from millrace.schemas.records import Grant, Resolution


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
