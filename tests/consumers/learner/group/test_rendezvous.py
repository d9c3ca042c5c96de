"""Where ranks meet: the leader alone says whether they form. Whatever else reaches its port changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import TCPStore

from millrace.consumers.learner.group.agreement import Peer, Roster
from millrace.consumers.learner.group.rendezvous import STORE_TIMEOUT_S, Meeting
from millrace.infra.errors import RegroupError
from millrace.infra.log.history.newest import Head
from millrace.trainers.backends.group import open_store
from tests.consumers.learner.group.garbage import Garbage
from tests.support.versions import entry, weights

HEAD = Head(weights(0, "d" * 64), entry(0, 0, 0, b""))


def nothing() -> None:
    """The group is as it was."""


def moved() -> None:
    raise RegroupError("the group changed while its ranks met")


class Table:
    """Learners that agreed to meet in the store of the first."""

    def __init__(self, world: int) -> None:
        self.store: TCPStore = open_store("127.0.0.1", STORE_TIMEOUT_S)
        self.peers = tuple(Peer(f"m{n}", "", "127.0.0.1", self.store.port, (n,)) for n in range(world))

    def sit(self, rank: int, wait: Callable[[], None]) -> Meeting:
        return Meeting(Roster("key", 1, self.peers, rank), self.store, wait)


def test_all_hear_what_the_leader_read() -> None:
    table = Table(3)
    with ThreadPoolExecutor(3) as pool:
        followers = [pool.submit(table.sit(rank, nothing).follow) for rank in (1, 2)]
        table.sit(0, nothing).lead(HEAD)
        assert [follower.result(10) for follower in followers] == [HEAD] * 2


def test_who_sees_the_group_move_forms_all_the_same_when_the_leader_says_go() -> None:
    table = Table(2)
    with ThreadPoolExecutor(1) as pool:
        follower = pool.submit(table.sit(1, moved).follow)
        table.sit(0, nothing).lead(HEAD)
        assert follower.result(10) == HEAD


def test_a_leader_that_sees_it_calls_the_others_off() -> None:
    table = Table(3)
    with ThreadPoolExecutor(1) as pool:
        follower = pool.submit(table.sit(1, moved).follow)
        meeting = table.sit(0, moved)
        with pytest.raises(RegroupError):
            meeting.lead(HEAD)
        meeting.call_off()
        with pytest.raises(RegroupError, match="changed while its ranks met"):
            follower.result(5)


def test_garbage_at_its_port_keeps_nobody_from_meeting() -> None:
    table = Table(3)
    with Garbage(lambda: [table.store.port]), ThreadPoolExecutor(3) as pool:
        followers = [pool.submit(table.sit(rank, nothing).follow) for rank in (1, 2)]
        table.sit(0, nothing).lead(HEAD)
        assert [follower.result(60) for follower in followers] == [HEAD] * 2
