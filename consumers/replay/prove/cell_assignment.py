"""Which cell of ranks trained which groups of a version.

The ledger says so of each group where it is new enough. Where it does not, the learner's own manifest is made again:
from the tokens of each group, and from who owned its partition, which Kafka's range assignor gave out by rank.

Invariant: what is found is compared with the numbers of samples and groups that the ledger counts for each rank, so a
wrong guess never trains. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from millrace.consumers.learner.group.agreement import Peer, Roster
from millrace.consumers.learner.step import next_work
from millrace.consumers.learner.version.order import Batch
from millrace.infra.errors import ProofError
from millrace.schemas.records import LedgerEntry, Resolution, TrainedGroup
from millrace.trainers.batches.sample import Sample

MOST_SPARES = 100_000
"""beside the ranks of one version: more than any group of learners has"""


def cells_of(entry: LedgerEntry) -> list[int]:
    """The cell of each rank, below 0 where it served a role."""
    return [share["cell"] for share in entry["ranks"]]


def manifest(
    entry: LedgerEntry, cells: Sequence[int], tokens: Mapping[int, int], shards: int, minibatches: int
) -> tuple[list[list[int]], dict[int, int]]:
    """Seqs in each minibatch, in training order, and the cell that trains each seq, for ranks in `cells`.

    tokens: of each group, by seq; shards: partitions of the trajectories. Raises ProofError for ranks that no learners
    had."""
    spares = entry["metrics"].get("spares", 0.0)
    if not cells or not 0 <= max(cells) < len(cells) or not 0 <= spares <= MOST_SPARES:
        raise ProofError(
            f"version {entry['version']}: its ledger entry names no ranks that can have trained it: run "
            "`millrace audit`"
        )
    batch = Batch(entry["seq_lo"], tuple(_resolution(group, tokens) for group in entry["groups"]), entry["eta"])
    roster = _roster(len(cells), int(spares), shards)
    train = next_work.manifest(batch, roster, cells, entry["version"] - 1, minibatches, None)
    cell_by_seq = next_work.cells_of(train)
    if list(cells) == cells_of(entry):
        cell_by_seq |= {group["seq"]: group["cell"] for group in entry["groups"] if group.get("cell", -1) >= 0}
    return train.minibatches, cell_by_seq


def check(entry: LedgerEntry, cells: Mapping[int, int], samples: Sequence[Sample]) -> None:
    """Raises ProofError where the ranks did not train what `cells` says, as far as the ledger counts it."""
    for share in entry["ranks"]:
        if share["cell"] < 0 or cells_of(entry).index(share["cell"]) != share["rank"]:
            continue
        samples_of_cell = [sample for sample in samples if cells[sample.seq] == share["cell"]]
        counts = (
            len({sample.trajectory for sample in samples_of_cell}),
            len({sample.seq for sample in samples_of_cell}),
        )
        if counts != (share["samples"], share["groups"]):
            raise ProofError(
                f"version {entry['version']}: the ledger counts {share['samples']} samples of {share['groups']} groups "
                f"for rank {share['rank']}, and {counts[0]} of {counts[1]} are found: its ledger entry does not say "
                "which rank trained which group, and the owners of partitions do not tell; prove another version"
            )


def _roster(world: int, spares: int, shards: int) -> Roster:
    """Ranks and spares with the partitions that the range assignor gives them."""
    members = max(1, world + spares)
    share, more = divmod(shards, members)
    bounds = [index * share + min(index, more) for index in range(members + 1)]
    peers = tuple(
        Peer(f"rank-{index}", "", "", 0, tuple(range(bounds[index], bounds[index + 1]))) for index in range(members)
    )
    return Roster("", 0, peers[:world], 0, peers[world:])


def _resolution(group: TrainedGroup, tokens: Mapping[int, int]) -> Resolution:
    """What the learner's manifest reads of a ready group."""
    return {
        "kind": "ready",
        "policy": "",
        "ticket": group["ticket"],
        "seq": group["seq"],
        "group": group["group"],
        "prompt_id": None,
        "solicited": False,
        "size": 0,
        "trajectories": group["trajectories"],
        "tokens": [tokens.get(group["seq"], 0)],
        "rewards": [],
        "v_head": -1,
        "v_tail": -1,
        "min_version": -1,
        "deadline": -1,
        "reason": None,
        "setting": None,
        "time": 0,
    }
