from __future__ import annotations

from typing import Any

import pytest

from millrace.consumers.learner.group.agreement import Peer, Roster
from millrace.consumers.learner.step.next_work import (
    Regroup,
    Stop,
    Wait,
    decode,
    encode,
    interrupt,
    lost_codes,
    manifest,
)
from millrace.consumers.learner.version.order import Batch


def roster(*owned: tuple[int, ...]) -> Roster:
    peers = tuple(Peer(f"m{i}", "", "h", 1, partitions) for i, partitions in enumerate(owned))
    return Roster("key", 1, peers, 0)


def batch(count: int, lo: int = 0, partitions: int = 4) -> Batch:
    groups: list[Any] = [
        {
            "seq": seq,
            "group": f"g{seq}",
            "tokens": [10 + seq % 3, 10],
            "trajectories": [{"topic": "t", "partition": seq % partitions, "offset": seq}],
        }
        for seq in range(lo, lo + count)
    ]
    return Batch(lo, tuple(groups), 2)


def quiet(**over: Any) -> Any:
    return interrupt(**{"has_moved": False, "stopping": 0, "world": 2, "failure": None, "is_done": False, **over})


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, type(None)),
        ({"has_moved": True}, Regroup),
        ({"failure": "refused"}, Regroup),
        ({"stopping": 1}, Regroup),
        ({"stopping": 2}, Stop),
        ({"stopping": 2, "has_moved": True}, Stop),
        ({"is_done": True}, Stop),
    ],
)
def test_what_interrupts(said: dict[str, Any], expected: type) -> None:
    assert isinstance(quiet(**said), expected)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_every_group_is_trained_once_by_one_rank(world: int) -> None:
    owned = [tuple(p for p in range(4) if p % world == rank) for rank in range(world)]
    train = manifest(batch(8, 16), roster(*owned), range(world), version=4, minibatches=2, oldest=None)
    shares = [part.seq for share in train.shares for part in share]
    assert sorted(shares) == list(range(16, 24))
    assert [seq for minibatch in train.minibatches for seq in minibatch] == list(range(16, 24))
    assert len(train.shares) == world
    assert all(train.shares) or world > 4
    assert (train.version, train.seq_lo, train.seq_hi) == (4, 16, 24)


def test_a_group_goes_to_the_owner_of_its_partition_when_that_is_fair() -> None:
    train = manifest(batch(4, partitions=2), roster((0,), (1,)), [0, 1], version=0, minibatches=1, oldest=None)
    assert [[part.places[0][1] for part in share] for share in train.shares] == [[0, 0], [1, 1]]


def test_orders_survive_the_wire() -> None:
    train = manifest(batch(3), roster((0, 1, 2, 3)), [0], version=0, minibatches=1, oldest=-2)
    for one in (train, Wait(), Regroup("the group changed"), Stop("done")):
        assert decode(encode(one)) == one


def test_the_ranks_of_a_cell_share_its_groups() -> None:
    """Pipeline first, as `p2` with two cells lies: ranks 0 and 2 are one cell. A spare owns the partitions 4 and 5."""
    ranks = tuple(Peer(f"m{rank}", "", "h", 1, (rank,)) for rank in range(4))
    here = Roster("key", 1, ranks, 0, (Peer("m4", "", "h", 1, (4, 5)),))
    train = manifest(batch(12, partitions=6), here, [0, 1, 0, 1], version=0, minibatches=1, oldest=None)
    assert len(train.shares) == 2
    assert sorted(part.seq for share in train.shares for part in share) == list(range(12))
    owned = [{place[1] for part in share for place in part.places} - {4, 5} for share in train.shares]
    assert owned == [{0, 2}, {1, 3}]


def test_a_rank_that_serves_has_no_share_of_the_batch() -> None:
    """What lies in the partitions that it owns goes to whoever has the least."""
    train = manifest(batch(8), roster((0,), (1,), (2, 3)), [0, 1, -1], version=0, minibatches=1, oldest=None)
    assert [len(share) for share in train.shares] == [4, 4]
    assert sorted(part.seq for share in train.shares for part in share) == list(range(8))


def test_a_rank_reports_what_it_lost_by_seq() -> None:
    train = manifest(batch(4, 8), roster((0, 1), (2, 3)), [0, 1], version=0, minibatches=1, oldest=None)
    assert lost_codes(train, {9: 3}) == [0, 3, 0, 0]
