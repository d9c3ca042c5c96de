"""What a deployment waits for while it starts, and when something is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from millrace.consumers.status.health import awaited, wrong
from millrace.consumers.status.watch import StatusWatch
from millrace.infra.log.memory.bus import MemoryBus
from millrace.infra.machine.supervisor import ProgramState

UNREACHED = "no broker answers at 127.0.0.1:9"


@pytest.fixture
def watch() -> Iterator[StatusWatch]:
    found = StatusWatch(MemoryBus({"n.p.ledger": 1, "n.p.resolutions": 1, "n.p.weights": 1, "n.workers": 1}), "n", "p")
    yield found
    found.close()


def states(**words: str) -> list[ProgramState]:
    return [ProgramState(name, word, 5, 3.0, "") for name, word in words.items()]


def test_a_deployment_without_a_version_waits_and_is_well(watch: StatusWatch) -> None:
    running = states(broker="RUNNING", refine="STARTING")
    assert awaited(watch, running) == [
        "refine to start",
        "version 0 (`millrace policy create --model DIR` writes it)",
    ]
    assert not wrong(watch, running, {})
    watch.began = True
    assert awaited(watch, states(broker="RUNNING")) == []
    assert not wrong(watch, states(broker="RUNNING"), {})


def test_a_broker_has_the_time_to_start_and_no_more() -> None:
    assert awaited(UNREACHED, states(broker="STARTING")) == ["broker to start", "the topics"]
    assert not wrong(UNREACHED, states(broker="STARTING"), {})
    assert wrong(UNREACHED, states(broker="RUNNING"), {})
    assert wrong(UNREACHED, states(seal="STARTING"), {}), "the broker is another's"


@pytest.mark.parametrize("word", ["BACKOFF", "FATAL", "STOPPED"])
def test_waiting_excuses_nothing_that_is_wrong(watch: StatusWatch, word: str) -> None:
    assert wrong(watch, states(broker="RUNNING", refine=word), {})
    assert wrong(watch, [ProgramState("refine", "STARTING", 5, 3.0, "KeyError", 7, failing=True)], {})
    assert wrong(watch, states(broker="RUNNING"), {"refine": 40.0})
    assert awaited(watch, []) == []
    assert wrong(watch, [], {})
