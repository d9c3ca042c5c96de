"""Following one policy by its topics."""

from __future__ import annotations

from millrace.consumers.status.watch import Watch
from millrace.infra.log.base import Outgoing
from millrace.infra.log.memory.bus import MemoryBus
from millrace.schemas import codec
from tests.support.versions import entry


def test_it_catches_up_with_what_was_written_and_then_follows() -> None:
    bus = MemoryBus({"n.p.ledger": 1, "n.p.resolutions": 1, "n.workers": 1})
    publisher = bus.publisher()

    def commit(version: int) -> None:
        record = entry(version, version - 1, version, b"")
        publisher.publish(Outgoing("n.p.ledger", b"p", codec.encode("LedgerEntry", record))).result(1)

    for version in range(4):
        commit(version)
    watch = Watch(bus, "n", "p")
    watch.catch_up()
    assert (watch.version, len(watch.versions)) == (3, 3), "version 0 is nobody's work"
    assert watch.began
    watch.catch_up()
    assert not watch.poll(0)
    commit(4)
    assert watch.poll(1)
    assert [found["version"] for found in watch.versions] == [1, 2, 3, 4]
    watch.close()
