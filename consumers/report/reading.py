"""The records that a report is made of. Trajectories and events are not among them: the audit reads those.

Invariants: every list is in log order; a topic that does not exist reads as empty; of what policies share, only what is
about this one or about none is read."""

from __future__ import annotations

from dataclasses import dataclass, field

from millrace.infra.log.base import Bus
from millrace.infra.log.history.kinds import (
    DEAD_LETTERS,
    DECISIONS,
    GRANTS,
    LEDGER,
    RESOLUTIONS,
    SCORES,
    WEIGHTS,
    WORKERS,
    Kind,
    R,
)
from millrace.infra.log.history.reader import History, left_out
from millrace.infra.log.history.rows import Resolve, as_stored
from millrace.infra.log.topics import stages_of, turns_of
from millrace.schemas.records import (
    DeadLetter,
    Decision,
    Evaluation,
    Grant,
    LedgerEntry,
    Resolution,
    WeightVersion,
    WorkerStatus,
)


@dataclass(frozen=True, slots=True)
class Reading:
    """What was read. Times are micros; `turns` holds, per `role/slot`, when each turn was written; `scores`:
    evaluations."""

    namespace: str
    policy: str
    weights: list[WeightVersion]
    ledger: list[LedgerEntry]
    resolutions: list[Resolution]
    grants: list[Grant]
    decisions: list[Decision]
    dead_letters: list[DeadLetter]
    workers: list[WorkerStatus]
    turns: dict[str, list[int]]
    now: int
    scores: list[Evaluation] = field(default_factory=list)


def read(bus: Bus, namespace: str, policy: str, now: int, resolve: Resolve = as_stored) -> Reading:
    """Read the small topics of a policy. `now` (micros) decides who counts as alive; `resolve` reads claims."""
    history = History(bus, namespace, policy, resolve)

    def fields(kind: Kind[R]) -> list[R]:
        """What cannot be read is left out: the audit names it."""
        return [row.record for row in history.rows(kind, own=True, unreadable=left_out)]

    turns: dict[str, list[int]] = {}
    for role in stages_of(policy):
        for record in history.records(turns_of(role)):
            turns.setdefault(f"{role}/{record.partition}", []).append(record.timestamp)
    return Reading(
        namespace,
        policy,
        weights=fields(WEIGHTS),
        ledger=fields(LEDGER),
        resolutions=fields(RESOLUTIONS),
        grants=fields(GRANTS),
        decisions=fields(DECISIONS),
        dead_letters=fields(DEAD_LETTERS),
        workers=fields(WORKERS),
        turns=turns,
        now=now,
        scores=fields(SCORES),
    )
