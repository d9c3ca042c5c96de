"""A transactor lets go in bounded time, whatever its brokers do: who is restored opens another."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.infra.errors import BusError
from millrace.infra.log.base import Bus, Outgoing, TopicSpec
from millrace.infra.log.kafka.bus import KafkaBus
from millrace.infra.log.kafka.write import TRANSACTION_S
from millrace.infra.machine.broker import Broker
from millrace.infra.process.net import wait_until
from tests.support.stopped import stop

pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.timeout(300)]

BOUND_S = 6 * TRANSACTION_S
"""each request of leaving is given up after TRANSACTION_S; the client's own `close` never gives up"""


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker(tmp_path / "broker") as running:
        running.start()
        yield running


@pytest.fixture
def bus(broker: Broker) -> Iterator[Bus]:
    with KafkaBus(broker.bootstrap) as opened:
        opened.ensure_topics([TopicSpec("t", 1)])
        yield opened


@pytest.mark.parametrize("ending", [False, True], ids=["writing", "committing"])
def test_a_transactor_leaves_a_frozen_broker_and_its_successor_goes_on(broker: Broker, bus: Bus, ending: bool) -> None:
    transactor = bus.transactor("one")
    transactor.begin()
    transactor.send(Outgoing("t", b"", b"lost"))
    transactor.flush()
    assert broker.pid
    stop(broker.pid)
    try:
        if ending:
            with pytest.raises(BusError):
                transactor.commit({}, None)
        leaving = threading.Thread(target=transactor.close, daemon=True)
        leaving.start()
        leaving.join(BOUND_S)
        assert not leaving.is_alive()
    finally:
        os.kill(broker.pid, signal.SIGCONT)
    successor = bus.transactor("one")
    successor.begin()
    successor.send(Outgoing("t", b"", b"kept"))
    successor.commit({}, None)
    successor.close()
    wait_until(lambda: values(bus)[-1:] == [b"kept"], "the successor's record", BOUND_S)
    wanted = [[b"lost", b"kept"], [b"kept"]] if ending else [[b"kept"]]
    assert values(bus) in wanted, "a commit without an answer may have been done"


def values(bus: Bus) -> list[bytes | None]:
    return [record.value for record in bus.read("t", 0)]
