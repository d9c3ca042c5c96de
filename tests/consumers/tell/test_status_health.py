"""What a deployment waits for while it starts, and when something is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from millrace.consumers.tell.status import StatusWatch, steps_ahead, wrong
from millrace.infra.log.memory.bus import MemoryBus
from millrace.infra.machine.supervisor import ProgramState
from millrace.infra.workers import status
from millrace.schemas import codec

NOW = 1_000_000
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
    assert steps_ahead(watch, running, NOW) == [
        "refine to start",
        "version 0 (`millrace policy create --model DIR` writes it)",
    ]
    assert not wrong(watch, running, {})
    watch.began = True
    assert steps_ahead(watch, states(broker="RUNNING"), NOW) == []
    assert not wrong(watch, states(broker="RUNNING"), {})


def test_a_broker_has_the_time_to_start_and_no_more() -> None:
    assert steps_ahead(UNREACHED, states(broker="STARTING"), NOW) == ["broker to start", "the topics"]
    assert not wrong(UNREACHED, states(broker="STARTING"), {})
    assert wrong(UNREACHED, states(broker="RUNNING"), {})
    assert wrong(UNREACHED, states(seal="STARTING"), {}), "the broker is another's"


@pytest.mark.parametrize("word", ["BACKOFF", "FATAL", "STOPPED"])
def test_waiting_excuses_nothing_that_is_wrong(watch: StatusWatch, word: str) -> None:
    assert wrong(watch, states(broker="RUNNING", refine=word), {})
    assert wrong(watch, [ProgramState("refine", "STARTING", 5, 3.0, "KeyError", 7, failing=True)], {})
    assert wrong(watch, states(broker="RUNNING"), {"refine": 40.0})
    assert steps_ahead(watch, [], NOW) == []
    assert wrong(watch, [], {})


def test_an_engine_that_does_not_answer_yet_is_waited_for(watch: StatusWatch) -> None:
    watch.began = True
    said = status(
        "n.workers", worker="engine-a", incarnation="unseen", role="engine", state="starting", policy="p", lives_s=6,
        url="http://a:1", error="the engine at http://a:1 does not answer: it loads, or is gone",
    )  # fmt: skip
    engine = codec.decode_by_name("WorkerStatus", said.value or b"")
    watch.workers["engine-a"] = engine
    running = states(broker="RUNNING", engine="RUNNING")
    assert steps_ahead(watch, running, engine["time"]) == [
        "the engine at http://a:1 to load its model (it does not answer yet)"
    ]
    assert not wrong(watch, running, {})
    assert steps_ahead(watch, running, engine["expires_at"]) == []
    watch.workers["engine-a"] = {**engine, "error": None}
    assert steps_ahead(watch, running, engine["time"]) == [], "it answers, and its first version is loaded"
