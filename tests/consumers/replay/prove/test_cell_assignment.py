"""Which cell trained which group: what is made again is what the learner's manifest gave, whoever was there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.consumers.learner.group.agreement import Peer, Roster
from millrace.consumers.learner.step import next_work
from millrace.consumers.learner.version.order import Batch
from millrace.consumers.replay.prove import cell_assignment
from millrace.infra.errors import ProofError
from millrace.trainers.batches.sample import Sample

TOPIC = "t.pico.trajectories"


def range_assigned(members: int, shards: int) -> list[tuple[int, ...]]:
    """What Kafka's range assignor gives to so many members of one topic: the first ones have one more."""
    left, given_ = list(range(shards)), []
    for index in range(members):
        many = shards // members + (index < shards % members)
        given_.append(tuple(left[:many]))
        left = left[many:]
    return given_


def group(seq: int, partition: int) -> Any:
    return {
        "seq": seq,
        "ticket": seq,
        "group": f"g{seq}",
        "trajectories": [{"topic": TOPIC, "partition": partition, "offset": seq}],
        "lost": None,
        "cell": -1,
    }


def entry(groups: list[Any], cells: list[int], spares: int = 0) -> Any:
    ranks = [{"rank": r, "member": "", "samples": 0, "tokens": 0, "groups": 0, "cell": c} for r, c in enumerate(cells)]
    return {
        "version": 5,
        "seq_lo": groups[0]["seq"],
        "seq_hi": groups[-1]["seq"] + 1,
        "groups": groups,
        "ranks": ranks,
        "eta": 2,
        "metrics": {"spares": float(spares)} if spares else {},
    }


@given(st.data())
def test_an_old_entry_gives_the_shares_of_its_time(data: st.DataObject) -> None:
    shards = data.draw(st.integers(1, 8))
    world = data.draw(st.integers(1, shards))
    spares = data.draw(st.integers(0, shards - world))
    per_cell = data.draw(st.sampled_from([size for size in (1, 2, 3) if world % size == 0]))
    cells = [rank // per_cell for rank in range(world)]
    count = data.draw(st.integers(1, 12))
    tokens = {seq: data.draw(st.integers(1, 50)) for seq in range(7, 7 + count)}
    groups = [group(seq, data.draw(st.integers(0, shards - 1))) for seq in tokens]
    minibatches = data.draw(st.integers(1, 4))

    owned = range_assigned(world + spares, shards)
    peers = [Peer(f"m{i}", "", "h", 1, partitions) for i, partitions in enumerate(owned)]
    roster = Roster("k", 3, tuple(peers[:world]), 0, tuple(peers[world:]))
    ready: Any = [{**one, "kind": "ready", "tokens": [tokens[one["seq"]]]} for one in groups]
    live = next_work.manifest(Batch(7, tuple(ready), 2), roster, cells, 4, minibatches, None)

    again, by_seq = cell_assignment.manifest(entry(groups, cells, spares), cells, tokens, shards, minibatches)
    assert again == live.minibatches
    assert by_seq == {part.seq: cell for cell, parts in enumerate(live.shares) for part in parts}


def test_what_the_entry_says_of_its_groups_counts() -> None:
    groups = [{**group(seq, 0), "cell": seq % 2} for seq in range(4)]
    _, by_seq = cell_assignment.manifest(entry(groups, [0, 1]), [0, 1], dict.fromkeys(range(4), 9), 4, 1)
    assert by_seq == {0: 0, 1: 1, 2: 0, 3: 1}


def sample(seq: int, trajectory: str) -> Sample:
    return Sample(
        np.zeros(2, np.int32),
        np.array([0, 1], np.uint8),
        np.zeros(2, np.float32),
        np.zeros(2, np.int32),
        1.0,
        seq,
        f"g{seq}",
        trajectory,
    )


def test_other_shares_than_the_ledger_counts_are_refused() -> None:
    it = entry([group(0, 0), group(1, 0)], [0, 1])
    it["ranks"][0] |= {"samples": 2, "groups": 1}
    it["ranks"][1] |= {"samples": 1, "groups": 1}
    samples = [sample(0, "a"), sample(0, "b"), sample(1, "c")]
    cell_assignment.check(it, {0: 0, 1: 1}, samples)
    with pytest.raises(ProofError, match="which rank trained which group"):
        cell_assignment.check(it, {0: 1, 1: 0}, samples)


@pytest.mark.parametrize(
    ("cells", "metrics"),
    [
        ([], {}),
        ([-1, -1], {}),
        ([0, 2**31 - 1], {}),
        ([0], {"spares": float("nan")}),
        ([0], {"spares": float("inf")}),
        ([0], {"spares": -1.0}),
        ([0], {"spares": 1e18}),
    ],
)
def test_ranks_that_nobody_had_are_refused(cells: list[int], metrics: dict[str, float]) -> None:
    forged = {**entry([group(0, 0)], cells), "metrics": metrics}
    with pytest.raises(ProofError, match="version 5: its ledger entry names no ranks"):
        cell_assignment.manifest(forged, cells, {0: 3}, 4, 1)
