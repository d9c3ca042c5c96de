"""A training from files on the screen: a bar where there is a terminal, else a line now and then. Loaded late: it takes
torch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from millrace.infra import telemetry
from millrace.trainers.offline.job import Job
from millrace.trainers.offline.loop import RunObserver
from millrace.trainers.offline.run import run
from millrace.trainers.tracking.jsonl import JsonlTracker
from millrace.trainers.tracking.line import line
from millrace.trainers.tracking.services import open_trackers
from millrace.trainers.weights.adapter import Lora
from millrace.trainers.weights.checkpoint import Checkpoint

QUIET_S = 5.0
"""between two lines of numbers where there is no terminal"""
MAX_EXAMPLES = 5
"""refused rows that are printed; the others are counted"""
MEANINGLESS = frozenset({"reward_mean", "staleness_mean"})

_tokens = telemetry.counter("millrace.training.tokens", "{token}", "tokens computed by a training from files")
_value = telemetry.gauge("millrace.training.value", "", "newest value of each measure of a training from files")


def train(
    algorithm: str, options: Mapping[str, Any], trackers: Sequence[str], console: Console, complain: Console
) -> None:
    """Run the job that the options describe, and say how it goes."""
    fields = dict(options)
    rank, alpha, alone = (fields.pop(name, 0) for name in ("lora_rank", "lora_alpha", "adapter_only"))
    lora = Lora(rank, alpha or 2 * rank, publish="adapter" if alone else "merge") if rank else None
    job = Job(algorithm, lora=lora, **fields)
    with ExitStack() as stack:
        screen = stack.enter_context(TrainingScreen(algorithm, console, complain))
        all_trackers = [JsonlTracker(job.out), *open_trackers(trackers, job.out, job.out.absolute().name)]
        for tracker in all_trackers:
            stack.callback(tracker.close)
        version = run(job, trackers=all_trackers, observer=screen)
    console.print(f"wrote {version.path}", highlight=False, soft_wrap=True)


class TrainingScreen(RunObserver):
    """Shows a training. Use it as a context."""

    def __init__(self, algorithm: str, console: Console, complain: Console) -> None:
        self._algorithm = algorithm
        self._console = console
        self._complain = complain
        self._refused = 0
        self._steps = 0
        self._printed = 0.0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(algorithm, total=None, numbers="", start=False)

    def __enter__(self) -> TrainingScreen:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def on_refusal(self, where: str, reason: str) -> None:
        self._refused += 1
        if self._refused <= MAX_EXAMPLES:
            self._complain.print(f"[yellow]left out[/] {escape(f'{where}: {reason}')}", highlight=False, soft_wrap=True)

    def on_start(self, step: int, steps: int, items: int) -> None:
        self._steps = steps
        if self._refused:
            self._complain.print(
                f"[yellow]{self._refused} rows left out[/]; --strict ends at the first", highlight=False
            )
        self._say(f"{self._algorithm}: {items} rows, batches {step + 1} to {steps}")
        self._bar.update(self._task, total=steps, completed=step)
        self._bar.start_task(self._task)

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        _tokens.add(metrics.get("tokens_computed", 0.0), algorithm=self._algorithm)
        for name, value in metrics.items():
            _value.set(value, algorithm=self._algorithm, name=name)
        numbers = line(metrics, without=MEANINGLESS)
        self._bar.update(self._task, completed=step, numbers=numbers)
        has_heldout = any(name.startswith("heldout_") for name in metrics)
        if has_heldout or (self._bar.disable and time.monotonic() - self._printed > QUIET_S):
            self._printed = time.monotonic()
            self._say(f"batch {step} of {self._steps}  {numbers}")

    def on_version(self, version: Checkpoint) -> None:
        self._say(f"version {version.path.name}")

    def warn(self, text: str) -> None:
        self._complain.print(f"[yellow]{escape(text)}[/]", highlight=False, soft_wrap=True)

    def _say(self, text: str) -> None:
        self._console.print(escape(text), highlight=False, soft_wrap=True)
