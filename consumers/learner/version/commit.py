"""One version, one transaction: the weight event, its ledger entry and the consumed offsets.

Invariants: the weights are durable before this is called; both fences hold (the transactor was opened before the ledger
was read, and the member token was captured when the ranks agreed, with a generation of at least 0); nothing is acted on
before the commit has returned.
"""

from __future__ import annotations

from collections.abc import Mapping

from millrace.infra import faults
from millrace.infra.errors import RefusedError
from millrace.infra.log.base import MemberToken, Outgoing, Transactor
from millrace.schemas import codec
from millrace.schemas.records import LedgerEntry, WeightVersion


def commit_version(
    transactor: Transactor,
    weights: WeightVersion,
    entry: LedgerEntry,
    offsets: Mapping[tuple[str, int], int],
    token: MemberToken,
    *,
    weights_topic: str,
    ledger_topic: str,
) -> None:
    """Make `weights` a version.

    Raises RefusedError (aborted: the group moved on), FencedError (another leader owns the policy), UnreachableError
    (outcome unknown: drop the transactor, open it again, read the ledger)."""
    if token.generation < 0:
        raise RefusedError("this member never joined a generation: its commit would be unfenced; join first")
    faults.point("learner.before_begin")
    transactor.begin()
    faults.point("learner.after_begin")
    transactor.send(Outgoing(weights_topic, weights["policy"].encode(), codec.encode("WeightVersion", weights)))
    faults.point("learner.after_send_weights")
    transactor.send(Outgoing(ledger_topic, str(entry["version"]).encode(), codec.encode("LedgerEntry", entry)))
    faults.point("learner.after_send_ledger")
    transactor.flush()
    faults.point("learner.before_commit")
    transactor.commit(offsets, token)
    faults.point("learner.after_commit")


def checkpoint_fault(name: str) -> None:
    """The points of `trainers.weights.checkpoint` and `delta_files`, whose callers say what happens at them, under
    names that the list of points finds."""
    match name:
        case "checkpoint.between_files":
            faults.point("checkpoint.between_files")
        case "checkpoint.after_write":
            faults.point("checkpoint.after_write")
        case "checkpoint.after_fsync":
            faults.point("checkpoint.after_fsync")
        case "checkpoint.before_rename":
            faults.point("checkpoint.before_rename")
        case "checkpoint.after_rename":
            faults.point("checkpoint.after_rename")
        case "checkpoint.after_parent_fsync":
            faults.point("checkpoint.after_parent_fsync")
        case "delta.before_rename":
            faults.point("delta.before_rename")
        case "delta.after_rename":
            faults.point("delta.after_rename")
        case _:
            raise ValueError(f"{name} is a kill point that has no name here: add it")
