"""Commands that train from files alone: sft, dpo, reward-model, distill. They need no broker and no settings."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from millrace.apps.cli.context import call, complain, console, entry
from millrace.apps.cli.training_flags import (
    Alone,
    Alpha,
    Batch,
    Bf16,
    Budget,
    Clip,
    Data,
    Decay,
    Device,
    Epochs,
    Evaluate,
    Fall,
    Floor,
    Holdout,
    Keep,
    Knobs,
    Length,
    Model,
    Out,
    Rank,
    Rate,
    Recompute,
    Resume,
    Save,
    Seed,
    Steps,
    Strict,
    Trackers,
    Warmup,
    knobs,
)
from millrace.infra import telemetry_setup


class Preference(StrEnum):
    """What `dpo` learns by."""

    DPO = "dpo"
    IPO = "ipo"


class Divergence(StrEnum):
    """What `distill` lowers."""

    FORWARD = "forward"
    REVERSE = "reverse"


def sft(
    context: typer.Context,
    model: Model,
    data: Data,
    out: Out,
    knob: Knobs = None,
    steps: Steps = 0,
    epochs: Epochs = 1,
    batch: Batch = 32,
    lr: Rate = 1e-5,
    warmup: Warmup = 0,
    decay: Fall = "constant",
    floor: Floor = 0.0,
    weight_decay: Decay = 0.0,
    max_grad_norm: Clip = 1.0,
    seed: Seed = 0,
    budget: Budget = 16384,
    max_length: Length = 0,
    holdout: Holdout = 0.0,
    evaluate_every: Evaluate = 0,
    save_every: Save = 0,
    keep: Keep = 2,
    resume: Resume = False,
    strict: Strict = False,
    bf16: Bf16 = False,
    checkpointing: Recompute = False,
    lora_rank: Rank = 0,
    lora_alpha: Alpha = 0,
    adapter_only: Alone = False,
    tracker: Trackers = None,
    device: Device = None,
) -> None:
    """Learn to say what the rows say: {"messages": [...]}, {"prompt", "completion"} or {"tokens", "mask"}."""
    _run("sft", context)


def dpo(
    context: typer.Context,
    model: Model,
    data: Data,
    out: Out,
    algorithm: Annotated[Preference, typer.Option(help="dpo or ipo")] = Preference.DPO,
    reference: Annotated[
        Path | None, typer.Option(help="frozen model to compare with; default: --model", exists=True, file_okay=False)
    ] = None,
    knob: Knobs = None,
    steps: Steps = 0,
    epochs: Epochs = 1,
    batch: Batch = 32,
    lr: Rate = 1e-6,
    warmup: Warmup = 0,
    decay: Fall = "constant",
    floor: Floor = 0.0,
    weight_decay: Decay = 0.0,
    max_grad_norm: Clip = 1.0,
    seed: Seed = 0,
    budget: Budget = 16384,
    max_length: Length = 0,
    holdout: Holdout = 0.0,
    evaluate_every: Evaluate = 0,
    save_every: Save = 0,
    keep: Keep = 2,
    resume: Resume = False,
    strict: Strict = False,
    bf16: Bf16 = False,
    checkpointing: Recompute = False,
    lora_rank: Rank = 0,
    lora_alpha: Alpha = 0,
    adapter_only: Alone = False,
    tracker: Trackers = None,
    device: Device = None,
) -> None:
    """Learn to prefer what was chosen over what was rejected: rows of {"prompt", "chosen", "rejected"}."""
    _run(algorithm.value, context)


def reward_model(
    context: typer.Context,
    model: Model,
    data: Data,
    out: Out,
    knob: Knobs = None,
    steps: Steps = 0,
    epochs: Epochs = 1,
    batch: Batch = 32,
    lr: Rate = 1e-5,
    warmup: Warmup = 0,
    decay: Fall = "constant",
    floor: Floor = 0.0,
    weight_decay: Decay = 0.0,
    max_grad_norm: Clip = 1.0,
    seed: Seed = 0,
    budget: Budget = 16384,
    max_length: Length = 0,
    holdout: Holdout = 0.0,
    evaluate_every: Evaluate = 0,
    save_every: Save = 0,
    keep: Keep = 2,
    resume: Resume = False,
    strict: Strict = False,
    bf16: Bf16 = False,
    checkpointing: Recompute = False,
    tracker: Trackers = None,
    device: Device = None,
) -> None:
    """Learn to score what was chosen above what was rejected: rows of {"prompt", "chosen", "rejected"}."""
    _run("reward-model", context)


def distill(
    context: typer.Context,
    model: Model,
    data: Data,
    out: Out,
    teacher: Annotated[
        Path, typer.Option(help="model to learn from, of the same vocabulary", exists=True, file_okay=False)
    ],
    direction: Annotated[Divergence, typer.Option(help="forward or reverse")] = Divergence.FORWARD,
    on_policy: Annotated[
        bool, typer.Option("--on-policy", help="the student answers the prompts itself; replies are not read")
    ] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="of a reply of the student")] = 256,
    knob: Knobs = None,
    steps: Steps = 0,
    epochs: Epochs = 1,
    batch: Batch = 32,
    lr: Rate = 1e-5,
    warmup: Warmup = 0,
    decay: Fall = "constant",
    floor: Floor = 0.0,
    weight_decay: Decay = 0.0,
    max_grad_norm: Clip = 1.0,
    seed: Seed = 0,
    budget: Budget = 16384,
    max_length: Length = 0,
    holdout: Holdout = 0.0,
    evaluate_every: Evaluate = 0,
    save_every: Save = 0,
    keep: Keep = 2,
    resume: Resume = False,
    strict: Strict = False,
    bf16: Bf16 = False,
    checkpointing: Recompute = False,
    lora_rank: Rank = 0,
    lora_alpha: Alpha = 0,
    adapter_only: Alone = False,
    tracker: Trackers = None,
    device: Device = None,
) -> None:
    """Learn a teacher's distributions, on replies that are given or on the student's own."""
    _run(f"distill-{direction.value}", context)


def _run(algorithm: str, context: typer.Context) -> None:
    """Make a job of the command's own options, which are the job's fields, and run it."""
    given: dict[str, Any] = {
        name: value for name, value in context.params.items() if name not in ("knob", "algorithm", "direction")
    }
    trackers = given.pop("tracker") or []
    given["knobs"] = knobs(context.params["knob"])
    telemetry_setup.setup(call(context).settings(), context.info_name or algorithm)
    entry("millrace.apps.cli.training:train")(algorithm, given, trackers, console, complain)
