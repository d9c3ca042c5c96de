from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from millrace.consumers.learner.group import membership
from millrace.consumers.learner.group.agreement import Roster, client_id
from millrace.consumers.learner.group.membership import Membership, refuses
from millrace.consumers.learner.group.watch import Watchdog, cut
from millrace.infra.errors import RegroupError
from millrace.infra.log.base import TopicSpec
from millrace.infra.log.memory.bus import MemoryBus

TOPIC, GROUP = "n.p.trajectories", "n.p.learn"


@pytest.fixture
def bus() -> MemoryBus:
    one = MemoryBus()
    one.ensure_topics([TopicSpec(TOPIC, 2)])
    return one


@pytest.fixture
def listening() -> Iterator[Callable[[], int]]:
    """Makes ports that accept connections, as a learner's store does."""
    open_: list[socket.socket] = []

    def make() -> int:
        open_.append(socket.create_server(("127.0.0.1", 0)))
        return int(open_[-1].getsockname()[1])

    yield make
    for one in open_:
        one.close()


def join(bus: MemoryBus, port: int) -> Membership:
    one = Membership(bus, GROUP, TOPIC, client_id("learner/x", "127.0.0.1", port), 6)
    one.join()
    return one


def never() -> bool:
    return False


def settle_all(*members: Membership) -> list[Roster | None]:
    found: list[Roster | None] = [None] * len(members)

    def run(index: int) -> None:
        found[index] = members[index].settle(never)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def test_members_that_settle_together_agree(bus: MemoryBus, listening: Callable[[], int]) -> None:
    one, two = join(bus, listening()), join(bus, listening())
    first, second = settle_all(one, two)
    assert first is not None
    assert second is not None
    assert (first.key, first.peers) == (second.key, second.peers)
    assert {first.rank, second.rank} == {0, 1}
    assert one.token is not None
    assert one.token.generation == first.generation
    assert one.holds(first)
    assert two.holds(second)


def test_a_join_is_seen_at_the_next_poll_and_ends_a_meeting(bus: MemoryBus, listening: Callable[[], int]) -> None:
    one = join(bus, listening())
    (alone,) = settle_all(one)
    assert alone is not None
    one.wait(alone)
    join(bus, listening())
    with pytest.raises(RegroupError):
        one.wait(alone)
    assert not one.holds(alone)


def test_a_dead_peer_is_expelled_and_a_live_one_is_not(bus: MemoryBus, listening: Callable[[], int]) -> None:
    one = join(bus, listening())
    with socket.socket() as held:  # nobody else listens there meanwhile
        held.bind(("127.0.0.1", 0))
        dead, live = held.getsockname()[1], listening()
        assert refuses("127.0.0.1", dead)
        assert not refuses("127.0.0.1", live)
        join(bus, dead)
        (roster,) = settle_all(one)
        assert roster is not None
        if roster.world == 2:  # a table that settles at once is believed: meeting would fail, and come back here
            (roster,) = settle_all(one)
    assert roster is not None
    assert roster.world == 1
    assert len(bus.group(GROUP).members) == 1


def test_without_a_new_generation_a_member_makes_one(
    bus: MemoryBus, listening: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "REJOIN_AFTER_S", 0.3)
    one = join(bus, listening())
    first, second = settle_all(one)[0], settle_all(one)[0]
    assert first is not None
    assert second is not None
    assert second.generation > first.generation


def test_a_member_without_a_partition_stands_by_until_one_is_free(bus: MemoryBus, listening: Callable[[], int]) -> None:
    owners = [join(bus, listening()), join(bus, listening())]
    spare = join(bus, listening())
    settled: list[Roster | None] = []
    waiting = threading.Thread(target=lambda: settled.append(spare.settle(never)))
    waiting.start()
    assert None not in settle_all(*owners)
    assert waiting.is_alive()
    owners[0].leave()
    assert settle_all(owners[1])[0] is not None
    waiting.join(30)
    assert settled[0] is not None
    assert settled[0].world == 2


def test_it_stops_when_asked(bus: MemoryBus, listening: Callable[[], int]) -> None:
    assert join(bus, listening()).settle(lambda: True) is None


@pytest.mark.slow
def test_the_watchdog_breaks_a_generation_that_lost_a_member(bus: MemoryBus, listening: Callable[[], int]) -> None:
    one, two = join(bus, listening()), join(bus, listening())
    roster = settle_all(one, two)[0]
    assert roster is not None
    broken = threading.Event()
    dog = Watchdog(bus, GROUP, broken.set)
    try:
        dog.watch(roster)
        assert not broken.wait(1.2)
        two.leave()
        assert broken.wait(60)
        broken.clear()
        dog.watch(roster)
        dog.rest()
        assert not broken.wait(1.2)
    finally:
        dog.close()


def test_cut_ends_a_blocked_read_from_that_address_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as cut_one, socket.create_server(("127.0.0.1", 0)) as kept_one:
        ports = [server.getsockname()[1] for server in (cut_one, kept_one)]
        clients = [socket.create_connection(("127.0.0.1", port)) for port in ports]
        peers = [server.accept()[0] for server in (cut_one, kept_one)]
        cut("127.0.0.1", ports[0])
        assert clients[0].recv(1) == b""
        peers[1].send(b"x")
        assert clients[1].recv(1) == b"x"
        for one in (*clients, *peers):
            one.close()
