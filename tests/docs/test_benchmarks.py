"""Every benchmark that the documents name runs, in a small form: that it prints its figures, not which.

Their `main` runs here, with flags that make it short, before the broker that all tests share."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import TracebackType

import pytest

from tests.support.documents import BENCHMARKS, ROOT, RUN_BY

SMALL = {
    "bench_audit": "--actions 400 --rounds 1",
    "bench_backends": "--groups 2 --steps 1 --ranks 1",
    "bench_codec": "",
    "bench_conversation": "--turns 10",
    "bench_delays": "--repeats 1 --only KB",
    "bench_delta": "--million 0.1 --steps 1",
    "bench_detection": "--items 1 --clean-mb 0.05",
    "bench_durability": "--records 100 --transactions 2",
    "bench_fleet": "--seconds 5",
    "bench_gateway": "--seconds 0.1 --processes 2",
    "bench_gateway_start": "--calls 300 --kills 1",
    "bench_gpu": "--device cpu --parts profile memory long --tokens 512",
    "bench_idle": "--idle 50 --clients 4 --seconds 0.1 --rounds 1",
    "bench_interrupt": "--engine light --rounds 1 --load 2 --tokens 24",
    "bench_killed": "--engine inprocess --batch 2 --kills 1",
    "bench_packing": "--samples 8 --steps 1",
    "bench_peers": "--groups 1 --steps 1 --peak-tflops 0.1",
    "bench_proximal": "--groups 2 --steps 1",
    "bench_questions": "--steps 6400",
    "bench_recovery": "--kills 1 --learners 2",
    "bench_reload": "--engine light --versions 2 --load 1",
    "bench_serving": "--seconds 0.1",
    "bench_stages": "--records 88 --rounds 1",
    "bench_start": "--ended 300",
    "bench_step": "--ranks 1 --steps 1",
    "bench_tokens": "--length 256",
    "bench_tree": "--prompts 16 --reply 8 --groups 1 --steps 1",
    "bench_warehouse": "--large 50 --small 500",
}
"""benchmark -> flags that make it short"""


class Started:
    """Stands for a broker of the benchmark's own."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap

    def start(self) -> None:
        """It runs already."""

    def __enter__(self) -> Started:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Others use it, too."""


def test_every_benchmark_has_a_small_form() -> None:
    assert set(SMALL) == {path.stem for path in (ROOT / "benchmarks").glob("bench_*.py")}
    named = {command.rpartition(".")[2] for command, runner in RUN_BY.items() if runner == BENCHMARKS}
    assert named - {"make bench"} == set(SMALL)


@pytest.mark.slow
@pytest.mark.kafka
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SMALL)
def test_it_runs(name: str, broker: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    benchmark = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "argv", [name, *SMALL[name].split()])

    def shared(home: Path, *, sync: bool = False) -> Started:
        return Started(broker)

    if hasattr(benchmark, "Broker"):
        monkeypatch.setattr(benchmark, "Broker", shared)
    benchmark.main()
    assert any(character.isdigit() for character in capsys.readouterr().out)
