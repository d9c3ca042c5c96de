"""What people see of a policy, from the entries of its ledger."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from millrace.consumers.tell.status import StatusWatch, learning, processes, silent_workers, spark, workers
from millrace.infra.log.memory.bus import MemoryBus
from millrace.infra.machine.supervisor import ProgramState
from millrace.infra.workers import FORGOTTEN_US

SECOND = 1_000_000


@pytest.fixture
def watch() -> Iterator[StatusWatch]:
    bus = MemoryBus({"n.p.ledger": 1, "n.p.resolutions": 1, "n.p.weights": 1, "n.workers": 1})
    found = StatusWatch(bus, "n", "p")
    yield found
    found.close()


def entry(version: int, reward: float = 0.5) -> Any:
    metrics = {"reward_mean": reward, "samples": 100.0, "tokens_computed": 1000.0, "staleness_max": 1.0}
    ranks = [{"rank": 0, "samples": 60, "cell": 0}, {"rank": 1, "samples": 40, "cell": 1}]
    return {"version": version, "time": version * 2 * SECOND, "metrics": metrics, "ranks": ranks, "seq_hi": 8 * version}


def shown(table: Table) -> str:
    console = Console(width=200)
    with console.capture() as caught:
        console.print(table)
    return caught.get()


def test_speed_is_by_the_times_of_the_commits_not_of_the_reading(watch: StatusWatch) -> None:
    assert watch.rate("samples") == 0
    watch.versions += [entry(version) for version in range(1, 12)]
    assert watch.rate("samples") == pytest.approx(50)
    assert watch.seconds == 20


def test_a_policy_at_work(watch: StatusWatch) -> None:
    assert "millrace policy create" in shown(learning(watch))
    watch.began = True
    assert "none yet" in shown(learning(watch))
    watch.versions += [entry(1, 0.0), entry(2, 1.0)]
    watch.ready = 20
    watch.resolved.update(ready=20, expired=3, setting=4)
    text = shown(learning(watch, target=60))
    for part in ("2 of 60", "1.000  ▁█", "2 (rank 0: 60, rank 1: 40 samples)", "4 ready groups", "3 expired, 20 ready"):
        assert part in text
    assert "setting" not in text


def test_what_is_asked_for_and_not_in_force_is_shown(watch: StatusWatch) -> None:
    watch.in_force.update(batch=64, eta=2)
    text = shown(learning(watch, settings={"batch": 16, "eta": 2, "release": "soft"}))
    assert "asked 16, in force 64" in text
    watch.in_force["group_size"] = 4
    assert "group_size  asked 8, in force 4" in shown(learning(watch, settings={"group_size": 8}))
    assert "eta" not in text
    assert "release" not in text


def test_the_ranks_of_a_cell_count_its_samples_once(watch: StatusWatch) -> None:
    last = entry(1, 0.0)
    last["ranks"] = [{"rank": 0, "samples": 60, "cell": 0}, {"rank": 1, "samples": 0, "cell": 0}]
    last["layout"], last["metrics"] = "torch:d1t2", {**last["metrics"], "spares": 1.0}
    watch.versions.append(last)
    assert "2 as torch:d1t2 (rank 0: 60 samples), 1 spare" in shown(learning(watch))


def test_ranks_that_serve_a_role_have_no_samples_to_show(watch: StatusWatch) -> None:
    last = entry(1, 0.0)
    last["ranks"] = [{"rank": 0, "samples": 60, "cell": 0}, {"rank": 1, "samples": 0, "cell": -1}]
    last["layout"] = "torch[actor]:d1+torch[critic]:d1"
    watch.versions.append(last)
    assert "2 as torch[actor]:d1+torch[critic]:d1 (rank 0: 60 samples)" in shown(learning(watch))


def test_only_those_whose_word_holds_are_alive(watch: StatusWatch) -> None:
    status: Any = {
        "role": "learner",
        "version": 3,
        "host": "h",
        "pid": 7,
        "url": None,
        "state": "serving",
        "error": None,
    }
    watch.workers |= {"old": status | {"expires_at": 10}, "new": status | {"expires_at": 30}}
    text = shown(workers(watch, 20))
    assert "new" in text
    assert "old" not in text


def test_an_engine_is_shown_with_its_kind_and_load(watch: StatusWatch) -> None:
    engine: Any = {
        "role": "engine",
        "version": 3,
        "host": "h",
        "pid": 7,
        "url": None,
        "state": "serving",
        "error": None,
        "expires_at": 30,
        "kind": "inprocess",
        "running": 5,
        "waiting": 2,
        "tokens_s": 812.4,
        "free_cache": 0.25,
    }
    watch.workers |= {"one": engine, "two": {**engine, "draining": True, "running": None, "tokens_s": None}}
    text = shown(workers(watch, 20))
    assert "engine (inprocess)" in text
    assert "5 running, 2 waiting, 812 tokens/s, cache 25% free" in text
    assert "takes no new calls, cache 25% free" in text


def test_an_engine_that_was_told_to_stop_is_drained_and_one_that_is_silent_gone(watch: StatusWatch) -> None:
    engine: Any = {
        "role": "engine",
        "version": 3,
        "host": "h",
        "pid": 7,
        "url": None,
        "state": "serving",
        "error": None,
        "expires_at": 30_000_000,
    }
    over = {**engine, "state": "stopped", "draining": True, "error": "drained: it has no calls", "version": None}
    watch.workers |= {"silent": engine, "drained": over, "learner": {**engine, "role": "learner"}}
    text = shown(workers(watch, 20_000_000))
    assert "drained: it has no calls" in text
    assert "stopped" not in text
    assert "gone" not in text
    text = shown(workers(watch, 75_000_000))
    assert "gone: no word of it for 45 s" in text
    assert text.count("gone") == 1, "who left well is not missed, and no other worker is"
    assert "gone" not in shown(workers(watch, 30_000_000 + FORGOTTEN_US))


def test_processes_that_fail_say_why() -> None:
    states = [
        ProgramState("a", "RUNNING", 5, 3661.0, "pid 5"),
        ProgramState("b", "FATAL", None, 0.0, "[exited] too quickly"),
    ]
    text = shown(processes(states))
    assert "1:01:01" in text
    assert "[exited] too quickly" in text
    assert "pid 5" not in text


def test_a_spark_stays_within_its_blocks() -> None:
    assert spark([-1.0, 0.0, 0.5, 1.0, 2.0]) == "▁▁▅██"


def test_a_program_that_keeps_ending_is_failing_and_says_why() -> None:
    states = [ProgramState("a", "RUNNING", 5, 3.0, "KeyError: 'grppo'", 7, failing=True)]
    text = shown(processes(states))
    for part in ("failing", "7 times", "KeyError: 'grppo'"):
        assert part in text


def test_a_worker_that_runs_without_a_word_in_the_log_is_shown_as_silent(watch: StatusWatch) -> None:
    one: Any = {"role": "learner", "policy": "p", "state": "serving", "error": None, "version": 3, "url": None}
    here = {**one, "host": socket.gethostname()}
    now = 1000 * SECOND
    lapsed, fresh = now - 40 * SECOND, now + SECOND
    watch.workers |= {
        "frozen": {**here, "pid": 1, "expires_at": lapsed},
        "well": {**here, "pid": 2, "expires_at": fresh},
        "elsewhere": {**one, "host": "far", "pid": 1, "expires_at": lapsed},
        "former": {**here, "pid": 3, "expires_at": lapsed},
        "ended": {**here, "pid": 1, "expires_at": lapsed, "state": "stopped"},
    }
    states = [ProgramState(str(pid), "RUNNING", pid, up, "") for pid, up in ((1, 500.0), (2, 500.0), (3, 10.0))]
    assert silent_workers(watch, now, states) == {"frozen": 40.0}
    text = shown(workers(watch, now, states))
    assert "silent for 40 s" in text
    assert "well" in text
    assert "former" not in text
