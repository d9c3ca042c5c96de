"""Points as MLflow metrics, in files or on a server."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millrace.trainers.tracking.base import Tracker
from millrace.trainers.tracking.packages import package

MARK = "millrace.step"
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
        self._last = max((int(m.step) for m in self._client.get_metric_history(self._run, MARK)), default=-1)
        self._unsure = True

    @property
    def last(self) -> int:
        return self._last

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        now = time.time_ns() // 10**6
        named = {**metrics, MARK: float(step)}
        if self._unsure:
            # A process that was killed may have written a part of this very point.
            named = {name: value for name, value in named.items() if not self._has(name, step)}
            self._unsure = False
        points = [self._metric(name, value, now, step) for name, value in named.items()]
        for start in range(0, len(points), BATCH):
            self._client.log_batch(self._run, metrics=points[start : start + BATCH])
        self._last = step

    def _has(self, name: str, step: int) -> bool:
        return any(metric.step == step for metric in self._client.get_metric_history(self._run, name))

    def close(self) -> None:
        return
