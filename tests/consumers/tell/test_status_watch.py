"""Following one policy by its topics."""

from __future__ import annotations

from millrace.consumers.tell.status import StatusWatch
from millrace.infra.log.base import Outgoing
from millrace.infra.log.memory.bus import MemoryBus
from millrace.schemas import codec
from millrace.streams.dispatch.records import resolution
from tests.support.versions import entry, weights


def test_it_catches_up_with_what_was_written_and_then_follows() -> None:
    bus = MemoryBus({"n.p.ledger": 1, "n.p.resolutions": 1, "n.p.weights": 1, "n.workers": 1})
    publisher = bus.publisher()

    def commit(version: int) -> None:
        record = entry(version, version - 1, version, b"")
        publisher.publish(Outgoing("n.p.ledger", b"p", codec.encode("LedgerEntry", record))).result(1)

    for version in range(4):
        commit(version)
    watch = StatusWatch(bus, "n", "p")
    watch.catch_up()
    assert (watch.version, len(watch.versions)) == (3, 3), "version 0 is nobody's work"
    assert watch.began
    watch.catch_up()
    assert not watch.poll(0)
    commit(4)
    assert watch.poll(1)
    assert [found["version"] for found in watch.versions] == [1, 2, 3, 4]
    watch.close()


def test_the_group_size_in_force_is_that_of_version_0_until_a_decision_says_another() -> None:
    bus = MemoryBus({"n.p.ledger": 1, "n.p.resolutions": 1, "n.p.weights": 1, "n.workers": 1})
    publisher = bus.publisher()
    for version, size in ((0, 8), (1, None)):
        event = weights(version, "d") | {"group_size": size}
        publisher.publish(Outgoing("n.p.weights", b"p", codec.encode("WeightVersion", event))).result()
    watch = StatusWatch(bus, "n", "p")
    watch.catch_up()
    assert watch.in_force == {"group_size": 8}
    setting = {"name": "group_size", "value": "4", "from_seq": None, "from_ticket": 6, "decision": "d"}
    record = resolution("setting", "p", 0) | {"setting": setting}
    publisher.publish(Outgoing("n.p.resolutions", b"p", codec.encode("Resolution", record))).result()
    watch.catch_up()
    assert watch.in_force == {"group_size": 4}
    watch.close()
    again = StatusWatch(bus, "n", "p")
    again.catch_up()
    assert again.in_force == {"group_size": 4}, "whichever topic is read first"
    again.close()
