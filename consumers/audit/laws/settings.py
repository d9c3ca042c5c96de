"""The law about the batch and eta: both change exactly where dispatch wrote that they do."""

from __future__ import annotations

import uuid

from millrace.consumers.audit.facts import Facts
from millrace.consumers.audit.law import Law
from millrace.infra.log.history.rows import Mark, Row
from millrace.infra.stages.decisions import AUTHOR, id_of, key_of
from millrace.schemas.records import Decision, Grant, LedgerEntry, Resolution

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
