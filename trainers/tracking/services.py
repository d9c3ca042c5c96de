"""Trackers by name; those of other tools, TensorBoard, MLflow and Weights & Biases, whose packages may be missing."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from millrace.infra import durable
from millrace.trainers.errors import BadConfiguration
from millrace.trainers.tracking.base import Tracker
from millrace.trainers.tracking.jsonl import JsonlTracker

PACKAGES = {
    "tensorboard": "tensorboard.summary.writer.event_file_writer",
    "mlflow": "mlflow.tracking",
    "wandb": "wandb",
}
"""Tracker -> the module without which it does not open."""


def check(trackers: Iterable[str]) -> None:
    """Raises BadConfiguration where one of `trackers` lacks its package. Imports nothing heavy."""
    for tracker in trackers:
        top = PACKAGES.get(tracker, "").partition(".")[0]
        if top and not _there(top):
            raise BadConfiguration(_missing(tracker, top))


def _there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # it was taken out of sys.modules by hand
        return False


def _missing(tracker: str, module: str) -> str:
    return (
        f"the tracker {tracker} needs {module}, which is not installed: run `make setup`, elsewhere "
        f"`pip install -e '.[tracking]'`, or leave {tracker} out"
    )


def package(name: str, tracker: str) -> Any:
    """The module `name`, imported now. Raises BadConfiguration where it is not installed, with what to install."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise BadConfiguration(f"{_missing(tracker, name)} ({error})") from error


class TensorboardTracker(Tracker):
    """Event files in `directory`, one more for each process that writes. A point is one event with all its scalars, so
    it is there whole or not at all."""

    def __init__(self, directory: Path) -> None:
        writer = package("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._event = package("tensorboard.compat.proto.event_pb2", "tensorboard").Event
        self._summary = package("tensorboard.compat.proto.summary_pb2", "tensorboard").Summary
        self._last = max((step for step, _ in points(directory)), default=-1)
        self._writer = writer.EventFileWriter(str(directory))

    @property
    def last(self) -> int:
        return self._last

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(self._event(step=step, summary=self._summary(value=values)))
        self._writer.flush()
        self._last = step

    def close(self) -> None:
        self._writer.close()


def points(directory: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """Every point that event files in `directory` hold, file by file; of a file that was cut short, the whole ones."""
    loader = package("tensorboard.backend.event_processing.event_file_loader", "tensorboard")
    event = package("tensorboard.compat.proto.event_pb2", "tensorboard").Event
    for path in sorted(directory.glob("events.out.tfevents.*")):
        for content in loader.RawEventFileLoader(str(path)).Load():
            record = event.FromString(content)
            if record.summary.value:
                yield record.step, {value.tag: value.simple_value for value in record.summary.value}


WHOLE_POINT = "millrace.step"
"""Metric written last of each point; what has it is whole."""
BATCH = 1000
"""Metrics that one request may hold."""


class MlflowTracker(Tracker):
    """One run of the experiment `millrace`, found again by its name. It goes where MLFLOW_TRACKING_URI says, else into
    files in `directory`."""

    def __init__(self, directory: Path, run: str) -> None:
        mlflow = package("mlflow.tracking", "mlflow")
        self._metric = package("mlflow.entities", "mlflow").Metric
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            # Without its database server MLflow keeps files only where this says that they are meant.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            directory.mkdir(parents=True, exist_ok=True)
            uri = directory.absolute().as_uri()
        self._client: Any = mlflow.MlflowClient(tracking_uri=uri)
        existing = self._client.get_experiment_by_name("millrace")
        experiment = existing.experiment_id if existing else self._client.create_experiment("millrace")
        name = run.replace("'", "")
        runs = self._client.search_runs([experiment], f"attributes.run_name = '{name}'", max_results=1)
        self._run = (runs[0] if runs else self._client.create_run(experiment, run_name=name)).info.run_id
        self._last = max((int(m.step) for m in self._client.get_metric_history(self._run, WHOLE_POINT)), default=-1)
        self._unsure = True

    @property
    def last(self) -> int:
        return self._last

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        now = time.time_ns() // 10**6
        values = {**metrics, WHOLE_POINT: float(step)}
        if self._unsure:
            # A process that was killed may have written a part of this very point.
            values = {name: value for name, value in values.items() if not self._has(name, step)}
            self._unsure = False
        points = [self._metric(name, value, now, step) for name, value in values.items()]
        for start in range(0, len(points), BATCH):
            self._client.log_batch(self._run, metrics=points[start : start + BATCH])
        self._last = step

    def _has(self, name: str, step: int) -> bool:
        return any(metric.step == step for metric in self._client.get_metric_history(self._run, name))

    def close(self) -> None:
        return


LAST_STEP = "last-step"


class WandbTracker(Tracker):
    """Offline runs in `directory`, one for each process that writes, in a folder of its own (W&B names runs by the
    second they began in); all have one id, so they are one run once `wandb sync` has uploaded
    them. They are online where WANDB_MODE says so.

    W&B writes in a process of its own and cannot be asked what it has, so the step is noted before it is handed over: a
    kill may cost the point that was being written, and never doubles one."""

    def __init__(self, directory: Path, run: str) -> None:
        wandb = package("wandb", "wandb")
        directory.mkdir(parents=True, exist_ok=True)
        self._mark = directory / LAST_STEP
        self._last = int(self._mark.read_text()) if self._mark.is_file() else -1
        life = directory / f"life-{sum(1 for _ in directory.glob('life-*'))}"
        life.mkdir()
        self._run = wandb.init(
            mode=os.environ.get("WANDB_MODE", "offline"),
            dir=str(life),
            project=os.environ.get("WANDB_PROJECT", "millrace"),
            name=run,
            id=hashlib.sha256(run.encode()).hexdigest()[:16],
            settings=wandb.Settings(silent=True, console="off", disable_git=True, x_disable_stats=True),
        )

    @property
    def last(self) -> int:
        return self._last

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        durable.write(self._mark, str(step), mode=durable.SHARED_MODE)
        self._last = step
        self._run.log(dict(metrics), step=step, commit=True)

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, Callable[[Path, str], Tracker]] = {
    "jsonl": lambda directory, run: JsonlTracker(directory),
    "tensorboard": lambda directory, run: TensorboardTracker(directory),
    "mlflow": MlflowTracker,
    "wandb": WandbTracker,
}
"""What opens each, from a directory of its own and the name of the run."""


def open_trackers(names: Iterable[str], directory: Path, run: str) -> list[Tracker]:
    """The trackers called `names`, each in `directory`/name. Raises BadConfiguration for one that is not known or not
    installed; then none is left open."""
    trackers: list[Tracker] = []
    try:
        for name in dict.fromkeys(names):
            if name not in TRACKERS:
                raise BadConfiguration(f"no tracker {name!r}: choose {', '.join(TRACKERS)}")
            trackers.append(TRACKERS[name](directory / name, run))
    except BaseException:
        for tracker in trackers:
            tracker.close()
        raise
    return trackers
