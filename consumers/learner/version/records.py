"""The records of one version: its weight event and its ledger entry, from what the step reported. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from millrace.consumers.learner.group.agreement import Roster
from millrace.consumers.learner.group.identity import Identity
from millrace.consumers.learner.version.order import Batch
from millrace.infra.log.history.ledger import chain_entry
from millrace.infra.log.history.newest import Head
from millrace.schemas.records import LedgerEntry, RankShare, TrainedGroup, WeightVersion
from millrace.trainers.learning import Report, Share
from millrace.trainers.weights.delta_files import WrittenDelta

ADAPTER = "adapter_config.json"
"""a file that only versions have which are adapters"""
AGES = 8
"""tokens are counted by how many versions they are behind: 0, 1, ... and everything from here on together"""


@dataclass(frozen=True, slots=True)
class Machine:
    """What a step ran on. device: cpu, or the name of the GPU; threads: of its CPU kernels; kernels: what it computed
    with, by what for (`Trainer.kernels`). All decide the last bits of a result."""

    device: str
    threads: int
    kernels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WrittenVersion:
    """A durable weight directory. files: name -> sha256 hex; size: bytes of its weight files; delta: what changed since
    the parent, where that is sent; broadcast: where engines ask for it, where it is sent to them."""

    uri: str
    digest: str
    files: Mapping[str, str]
    size: int
    delta: WrittenDelta | None = None
    broadcast: str | None = None


def weight_event(head: Head, batch: Batch, version: WrittenVersion, time: int) -> WeightVersion:
    """The event that makes `version` the version after `head`."""
    return {
        **head.weights,
        "version": head.version + 1,
        "parent": head.version,
        "mode": "adapter" if ADAPTER in version.files else "delta" if version.delta else "full",
        "uri": version.uri,
        "digest": version.digest,
        "files": dict(version.files),
        "seq_lo": batch.seq_lo,
        "seq_hi": batch.seq_hi,
        "batch": None,
        "eta": None,
        "shards": None,
        "group_size": None,
        "time": time,
        "delta": str(version.delta.path) if version.delta else None,
        "delta_hash": version.delta.digest if version.delta else None,
        "delta_bytes": version.delta.size if version.delta else None,
        "full_bytes": version.size,
        "broadcast": version.broadcast,
        "parent_policy": None,
        "selection": None,
        "selection_digest": None,
        "selection_places": None,
        "reward_source": None,
        "reward_rubric": None,
        "text_replies": None,
        "text_form": None,
    }


def ledger_entry(
    head: Head,
    batch: Batch,
    version: WrittenVersion,
    report: Report,
    losses: Mapping[int, str],
    roster: Roster,
    ranks: list[RankShare],
    layout: str,
    identity: Identity,
    machine: Machine,
    time: int,
    cells: Mapping[int, int],
) -> LedgerEntry:
    """What trained the version after `head`, linked to the chain.

    losses: reason by seq of groups that could not be read; cells: by seq, the cell that was to compute a group."""
    return chain_entry(
        {
            "policy": head.entry["policy"],
            "version": head.version + 1,
            "seq_lo": batch.seq_lo,
            "seq_hi": batch.seq_hi,
            "groups": trained_groups(batch, losses, cells),
            "ranks": ranks,
            "layout": layout,
            "generation": roster.generation,
            "leader": roster.leader.member_id,
            "unchanged": report.unchanged,
            "masked_tokens": report.masked_tokens,
            "digest": version.digest,
            "libraries": dict(identity.libraries),
            "cpu": identity.cpu,
            "config_hash": identity.config,
            "code_hash": identity.code,
            "metrics": {**report.metrics, **batch_staleness(batch, head.version)},
            "eta": batch.eta,
            "prev_hash": b"",
            "hash": b"",
            "time": time,
            "config": identity.text,
            "models": dict(identity.models),
            "device": machine.device,
            "threads": machine.threads,
            "kernels": dict(machine.kernels),
        },
        head.entry["hash"],
    )


def rank_shares(roster: Roster, cells: Sequence[int], shares: Sequence[Share]) -> list[RankShare]:
    """Who computed what: the ranks of a cell train the same samples together, which count at the first of them.

    cells: by rank, below 0 where a rank serves a role; shares: by cell."""
    out: list[RankShare] = []
    for rank, (peer, cell) in enumerate(zip(roster.peers, cells, strict=True)):
        first = cell >= 0 and cells.index(cell) == rank
        share = shares[cell] if first else Share(0, 0, 0)
        out.append(
            {
                "rank": rank,
                "member": peer.member_id,
                "samples": share.samples,
                "tokens": share.tokens,
                "groups": share.groups,
                "cell": cell,
            }
        )
    return out


def trained_groups(batch: Batch, losses: Mapping[int, str], cells: Mapping[int, int]) -> list[TrainedGroup]:
    """The batch's groups as the ledger names them. losses: reason by seq; cells: by seq, -1 where none is known."""
    return [
        {
            "seq": seq,
            "ticket": group["ticket"],
            "group": group["group"],
            "trajectories": group["trajectories"],
            "lost": losses.get(seq),
            "cell": cells.get(seq, -1),
        }
        for seq, group in enumerate(batch.groups, batch.seq_lo)
    ]


def batch_staleness(batch: Batch, version: int) -> dict[str, float]:
    """How far behind `version` the groups' oldest (head) and newest (tail) trainable tokens are."""
    heads = [float(version - group["v_head"]) for group in batch.groups if group["v_head"] >= 0]
    tails = [float(version - group["v_tail"]) for group in batch.groups if group["v_tail"] >= 0]
    out: dict[str, float] = {}
    for name, ages in (("head", heads), ("tail", tails)):
        if ages:
            out[f"staleness_{name}_mean"] = sum(ages) / len(ages)
            out[f"staleness_{name}_max"] = max(ages)
    return out


def histogram(counts: Sequence[float]) -> dict[str, float]:
    """Metrics from the numbers of trainable tokens by age, `AGES` + 1 of them."""
    names = [f"staleness_tokens_{age}" for age in range(AGES)] + [f"staleness_tokens_{AGES}_or_more"]
    return {name: count for name, count in zip(names, counts, strict=True) if count}
