"""A training from files that kills itself: python -m tests.trainers.offline.dying_offline MODEL DATA OUT POINT COUNT.

It dies when it passes POINT for the COUNT-th time; with COUNT 0 it lives."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

from millrace.trainers.offline.job import Job
from millrace.trainers.offline.run import run
from millrace.trainers.tracking.jsonl import JsonlTracker


def job(model: Path, data: Path, out: Path) -> Job:
    """Ten batches, a version after every second."""
    return Job(
        "sft", model, data, out, steps=10, batch=8, lr=1e-3, warmup=4, save_every=2, keep=1, holdout=0.1, resume=True
    )


def main(model: str, data: str, out: str, point: str, count: str) -> None:
    torch.set_num_threads(1)
    left = int(count)

    def fault(name: str) -> None:
        nonlocal left
        if name == point:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    run(job(Path(model), Path(data), Path(out)), trackers=[JsonlTracker(Path(out))], fault=fault)


if __name__ == "__main__":
    main(*sys.argv[1:])
