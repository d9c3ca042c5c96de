"""The process group of a backend by itself; over several ranks it is tested through the backends."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore
from torch.distributed.distributed_c10d import _world

from millrace.trainers.backends.group import FORM_S, RankGroup, open_store
from millrace.trainers.errors import BadConfiguration
from millrace.trainers.phase_clock import Clock


@pytest.fixture
def group() -> Iterator[RankGroup]:
    made = RankGroup(Clock(), cuda=False)
    yield made
    made.leave()


def test_one_rank_needs_no_store_and_adds_up_alone(group: RankGroup) -> None:
    group.join(0, 1, None, 5.0)
    assert (group.rank, group.world, group.formed) == (0, 1, True)
    assert group.sum([1.5, 2.0]) == [1.5, 2.0]
    assert group.max([-1.0]) == [-1.0]
    assert (group.announce(b"go"), group.announce(b"")) == (b"go", b"")
    group.leave()
    group.leave()
    assert not group.formed
    assert not dist.is_initialized()


@pytest.mark.parametrize(("rank", "world"), [(2, 2), (-1, 2), (0, 2)])
def test_what_cannot_form_is_refused_before_anything_is_touched(group: RankGroup, rank: int, world: int) -> None:
    with pytest.raises(BadConfiguration):
        group.join(rank, world, HashStore() if rank else None, 5.0)
    assert not dist.is_initialized()


@pytest.mark.parametrize("timeout", [5.0, 500.0])
def test_groups_inside_are_made_while_nobody_waits_long(group: RankGroup, timeout: float) -> None:
    waits: list[timedelta] = []
    group.join(0, 1, None, timeout, waits.append)
    assert waits == [timedelta(seconds=min(timeout, FORM_S))]


def test_a_group_that_fails_inside_leaves_nothing_and_the_next_has_its_first_name(group: RankGroup) -> None:
    def within(_: timedelta) -> None:
        dist.new_group([0])
        raise ValueError("a peer died")

    with pytest.raises(ValueError, match="a peer died"):
        group.join(0, 1, None, 5.0, within)
    assert not group.formed
    assert not dist.is_initialized()
    assert _world.group_count == 0
    group.join(0, 1, None, 5.0)
    assert group.formed


def test_a_store_listens_on_its_host_alone() -> None:
    store = open_store("127.0.0.1", 1.0)
    listening = {
        connection.laddr.ip
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == store.port
    }
    assert listening == {"127.0.0.1"}
    peer = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5))
    peer.set("key", "value")
    assert store.get("key") == b"value"
