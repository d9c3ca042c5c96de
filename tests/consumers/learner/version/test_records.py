"""Who computed what, as the ledger tells it."""

from __future__ import annotations

from millrace.consumers.learner.group.agreement import Peer, Roster
from millrace.consumers.learner.version.records import rank_shares
from millrace.trainers.learning import Share


def test_a_cell_counts_at_its_first_rank_and_a_rank_that_serves_counts_nothing() -> None:
    peers = tuple(Peer(f"m{rank}", "", "h", 1, (rank,)) for rank in range(5))
    found = rank_shares(Roster("key", 1, peers, 0), [0, 1, 0, 1, -1], [Share(5, 50, 3), Share(3, 30, 1)])
    assert [share["cell"] for share in found] == [0, 1, 0, 1, -1]
    assert [(share["samples"], share["tokens"], share["groups"]) for share in found] == [
        (5, 50, 3),
        (3, 30, 1),
        (0, 0, 0),
        (0, 0, 0),
        (0, 0, 0),
    ]
    assert [share["member"] for share in found] == ["m0", "m1", "m2", "m3", "m4"]
