"""The conformance suite of trackers: what they wrote is read back from their files."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.trainers.errors import BadConfiguration
from millrace.trainers.tracking import services
from millrace.trainers.tracking.base import Tracker
from millrace.trainers.tracking.services import TRACKERS, open_trackers
from tests.support import tracked
from tests.support.documents import ROOT

pytestmark = pytest.mark.slow

METRICS = [{"loss": 1.0, "reward_mean": 0.25}, {"loss": 0.5}, {"loss": 0.25, "heldout_loss": 2.0}]


@pytest.fixture(scope="module", autouse=True)
def _no_service_is_left() -> Iterator[None]:
    yield
    import wandb

    wandb.teardown()


@pytest.fixture(params=sorted(TRACKERS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def opened(name: str, root: Path) -> Tracker:
    (tracker,) = open_trackers([name], root, "it's a run")
    return tracker


def read(name: str, root: Path, *wanted: int) -> tracked.Points:
    """What was written. W&B's own process may still be at it: up to a minute is spent until the wanted steps are
    there."""
    until = time.monotonic() + 60
    while True:
        found = tracked.READERS[name](root / name)
        if name != "wandb" or set(wanted) <= {step for step, _ in found} or time.monotonic() > until:
            return found
        time.sleep(0.1)


def test_points_are_read_back_and_none_is_doubled_by_a_second_life(name: str, tmp_path: Path) -> None:
    tracker = opened(name, tmp_path)
    assert tracker.last == -1
    assert [tracker.log(step, metrics) for step, metrics in enumerate(METRICS)] == [True] * 3
    assert not tracker.log(1, {"loss": 9.0}), "it has its point"
    assert tracker.last == 2
    tracker.close()
    again = opened(name, tmp_path)
    assert again.last == 2
    assert [again.log(step, {"loss": 9.0}) for step in range(5)] == [False] * 3 + [True] * 2
    again.close()
    assert read(name, tmp_path, *range(5)) == [*enumerate(METRICS), (3, {"loss": 9.0}), (4, {"loss": 9.0})]


def test_what_is_no_number_is_left_out(name: str, tmp_path: Path) -> None:
    tracker = opened(name, tmp_path)
    tracker.log(7, {"loss": 0.5, "reward_mean": math.nan, "grad_norm": math.inf})
    tracker.close()
    assert read(name, tmp_path, 7) == [(7, {"loss": 0.5})]


def test_a_killed_process_leaves_no_doubled_point(name: str, tmp_path: Path) -> None:
    # W&B names its service to child processes; a process that dies in earnest has one of its own.
    alone = {key: value for key, value in os.environ.items() if key != "WANDB_SERVICE"}
    died = subprocess.run([sys.executable, "-m", "tests.support.tracked", name, str(tmp_path)], cwd=ROOT, env=alone)
    assert died.returncode == -9
    (tracker,) = open_trackers([name], tmp_path, "run")
    for step in range(1, 6):
        tracker.log(step, {"loss": 1 / step})
    tracker.close()
    found = read(name, tmp_path, 4, 5)
    steps = [step for step, _ in found]
    assert len(set(steps)) == len(steps)
    # W&B's own process may lose what it held.
    wanted = {4, 5} if name == "wandb" else {1, 2, 3, 4, 5}
    assert wanted <= set(steps) <= {1, 2, 3, 4, 5}
    assert all(metrics["loss"] == pytest.approx(1 / step) for step, metrics in found)


def test_a_file_that_was_cut_short_keeps_its_whole_points(tmp_path: Path) -> None:
    tracker = opened("jsonl", tmp_path)
    for step, metrics in enumerate(METRICS):
        tracker.log(step, metrics)
    tracker.close()
    path = tmp_path / "jsonl" / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    tracker = opened("jsonl", tmp_path)
    assert tracker.last == 1
    tracker.log(2, METRICS[2])
    tracker.close()
    assert read("jsonl", tmp_path) == [*enumerate(METRICS)]


def test_a_half_written_mlflow_point_is_completed(tmp_path: Path) -> None:
    tracker = opened("mlflow", tmp_path)
    tracker.log(0, METRICS[0])
    (path,) = (tmp_path / "mlflow").glob("*/*/metrics/loss")
    path.write_text(path.read_text() + "17 0.5 1\n")
    again = opened("mlflow", tmp_path)
    assert again.last == 0
    again.log(1, {"loss": 0.5, "reward_mean": 0.75})
    assert read("mlflow", tmp_path) == [(0, METRICS[0]), (1, {"loss": 0.5, "reward_mean": 0.75})]


def test_what_cannot_be_opened_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadConfiguration, match="no tracker 'excel'"):
        open_trackers(["jsonl", "excel"], tmp_path, "run")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(BadConfiguration, match="run `make setup`"):
        services.package("wandb", "wandb")
    services.check(["jsonl", "tensorboard", "mlflow"])
    monkeypatch.setattr(services.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadConfiguration, match=r"tracker mlflow needs mlflow.*run `make setup`"):
        services.check(["jsonl", "mlflow"])
