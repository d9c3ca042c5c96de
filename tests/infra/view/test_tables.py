"""What people see of a policy, from the entries of its ledger."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from infra.bus.memory import MemoryBus
from infra.services.supervisor import State
from infra.view.tables import learning, processes, spark, workers
from infra.view.watch import Watch

SECOND = 1_000_000


@pytest.fixture
def watch() -> Iterator[Watch]:
    bus = MemoryBus({"n.p.ledger": 1, "n.p.resolutions": 1, "n.workers": 1})
    found = Watch(bus, "n", "p")
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


def test_speed_is_by_the_times_of_the_commits_not_of_the_reading(watch: Watch) -> None:
    assert watch.rate("samples") == 0
    watch.versions += [entry(version) for version in range(1, 12)]
    assert watch.rate("samples") == pytest.approx(50)
    assert watch.seconds == 20


def test_a_policy_at_work(watch: Watch) -> None:
    assert "none yet" in shown(learning(watch))
    watch.versions += [entry(1, 0.0), entry(2, 1.0)]
    watch.ready = 20
    watch.resolved.update(ready=20, expired=3, setting=4)
    text = shown(learning(watch, target=60))
    for part in ("2 of 60", "1.000  ▁█", "2 (rank 0: 60, rank 1: 40 samples)", "4 ready groups", "3 expired, 20 ready"):
        assert part in text
    assert "setting" not in text


def test_the_ranks_of_a_cell_count_its_samples_once(watch: Watch) -> None:
    last = entry(1, 0.0)
    last["ranks"] = [{"rank": 0, "samples": 60, "cell": 0}, {"rank": 1, "samples": 0, "cell": 0}]
    last["layout"], last["metrics"] = "torch:d1t2", {**last["metrics"], "spares": 1.0}
    watch.versions.append(last)
    assert "2 as torch:d1t2 (rank 0: 60 samples), 1 spare" in shown(learning(watch))


def test_ranks_that_serve_a_role_have_no_samples_to_show(watch: Watch) -> None:
    last = entry(1, 0.0)
    last["ranks"] = [{"rank": 0, "samples": 60, "cell": 0}, {"rank": 1, "samples": 0, "cell": -1}]
    last["layout"] = "torch[actor]:d1+torch[critic]:d1"
    watch.versions.append(last)
    assert "2 as torch[actor]:d1+torch[critic]:d1 (rank 0: 60 samples)" in shown(learning(watch))


def test_only_those_whose_word_holds_are_alive(watch: Watch) -> None:
    status: Any = {"version": 3, "host": "h", "pid": 7, "url": None, "state": "serving", "error": None}
    watch.workers |= {"old": status | {"expires_at": 10}, "new": status | {"expires_at": 30}}
    text = shown(workers(watch, 20))
    assert "new" in text
    assert "old" not in text


def test_processes_that_fail_say_why() -> None:
    states = [State("a", "RUNNING", 5, 3661.0, "pid 5"), State("b", "FATAL", None, 0.0, "[exited] too quickly")]
    text = shown(processes(states))
    assert "1:01:01" in text
    assert "[exited] too quickly" in text
    assert "pid 5" not in text


def test_a_spark_stays_within_its_blocks() -> None:
    assert spark([-1.0, 0.0, 0.5, 1.0, 2.0]) == "▁▁▅██"
