"""Points as a Weights & Biases run, offline unless WANDB_MODE says otherwise; `wandb sync` uploads it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from millrace.infra import durable
from millrace.trainers.tracking.base import Tracker
from millrace.trainers.tracking.packages import package

MARK = "last-step"


class WandbTracker(Tracker):
    """Offline runs in `directory`, one for each process that writes, in a folder of its own (W&B names runs by the
    second they began in); all have one id, so they are one run once they are uploaded.

    W&B writes in a process of its own and cannot be asked what it has, so the step is noted before it is handed over: a
    kill may cost the point that was being written, and never doubles one."""

    def __init__(self, directory: Path, run: str) -> None:
        wandb = package("wandb", "wandb")
        directory.mkdir(parents=True, exist_ok=True)
        self._mark = directory / MARK
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
        durable.write(self._mark, str(step), mode=durable.SHARED)
        self._last = step
        self._run.log(dict(metrics), step=step, commit=True)

    def close(self) -> None:
        self._run.finish()
