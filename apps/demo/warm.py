"""The demo's torch work, each in a child process: the warm start and version 0."""

from __future__ import annotations

from pathlib import Path

from millrace.infra.config import Settings

TASKS = 20_000


def start(home: Path, seed: int, target: float = 0.2) -> tuple[int, float, float]:
    """Writes `home/model`, warm once `target` of sampled replies are right, and `home/tasks.jsonl`.

    Returns SFT steps, sampled accuracy and seconds."""
    import torch

    from millrace.apps.demo import sort_digits
    from millrace.apps.demo.tiny import make_sort_policy

    torch.set_num_threads(1)  # a second thread only helps on idle cores, and here the broker starts beside it
    sort_digits.write_tasks(home / "tasks.jsonl", TASKS, seed)
    warm = make_sort_policy(home / "model", seed, target=target)
    return warm.steps, warm.accuracy, warm.seconds


def create_policy(settings: Settings) -> None:
    """Writes version 0 of the policy from `home/model`."""
    from millrace.consumers import version_zero
    from millrace.infra.connect import connect

    with connect(settings) as bus:
        version_zero.create(settings, settings.home / "model", bus)
