"""Commands that train from files alone: sft, dpo, reward-model, distill. They need no broker and no settings."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from millrace.apps.cli.context import call, complain, console, entry
from millrace.infra import telemetry_setup
from millrace.infra.errors import ConfigError

Model = Annotated[Path, typer.Option(help="model to start from, in Hugging Face layout", exists=True, file_okay=False)]
Data = Annotated[Path, typer.Option(help="JSONL file, or directory that `datasets` saved", exists=True)]
Out = Annotated[Path, typer.Option(help="directory for the versions", file_okay=False)]
Knobs = Annotated[
    list[str] | None, typer.Option("--knob", metavar="KEY=VALUE", help="override a knob; may be repeated")
]
Steps = Annotated[int, typer.Option(min=0, help="batches in all; 0: as many as the epochs have")]
Epochs = Annotated[int, typer.Option(min=1, help="times through the data")]
Batch = Annotated[int, typer.Option(min=1, help="rows of a batch")]
Rate = Annotated[float, typer.Option(help="learning rate of AdamW")]
Warmup = Annotated[int, typer.Option(min=0, help="optimizer steps over which the learning rate rises to lr")]
Fall = Annotated[str, typer.Option(help="how lr goes on until the last batch: constant, linear or cosine")]
Floor = Annotated[float, typer.Option("--lr-floor", min=0, max=1, help="share of lr that linear and cosine fall to")]
Decay = Annotated[float, typer.Option(min=0, help="weight decay of AdamW")]
Clip = Annotated[float, typer.Option(help="gradients are clipped to this norm")]
Seed = Annotated[int, typer.Option(min=0, help="of every random choice")]
Budget = Annotated[int, typer.Option(min=1, help="tokens of one packed row of a forward pass")]
Length = Annotated[int, typer.Option(min=0, help="longest sequence in tokens; 0: what the model takes")]
Holdout = Annotated[float, typer.Option(min=0, max=0.99, help="share of the rows that is only measured on")]
Evaluate = Annotated[int, typer.Option(min=0, help="batches between two measurements; 0: only before and after")]
Save = Annotated[int, typer.Option(min=0, help="batches between two versions; 0: one every 5 minutes, and the last")]
Keep = Annotated[int, typer.Option(min=1, help="newest versions whose files are kept")]
Resume = Annotated[bool, typer.Option("--resume", help="go on from the newest version in --out")]
Strict = Annotated[bool, typer.Option("--strict", help="end at the first row that cannot be used")]
Trackers = Annotated[
    list[str] | None,
    typer.Option("--tracker", help="tensorboard, mlflow or wandb, beside the versions; may be repeated"),
]
Bf16 = Annotated[bool, typer.Option("--bf16", help="layers compute in bfloat16; weights and losses stay fp32")]
Recompute = Annotated[bool, typer.Option("--activation-checkpointing", help="compute layers twice to save memory")]
Rank = Annotated[int, typer.Option(min=0, help="learn an adapter (LoRA) of this rank only; 0: all weights")]
Alpha = Annotated[int, typer.Option(min=0, help="scale of the adapter times its rank; 0: twice the rank")]
Alone = Annotated[bool, typer.Option("--adapter-only", help="write adapters alone instead of merged weights")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; default: what there is")]


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
    given["knobs"] = dict(_knob(pair) for pair in context.params["knob"] or [])
    telemetry_setup.setup(call(context).settings(), context.info_name or algorithm)
    entry("millrace.apps.cli.training:train")(algorithm, given, trackers, console, complain)


def _knob(pair: str) -> tuple[str, Any]:
    name, equals, text = pair.partition("=")
    if not equals:
        raise ConfigError(f"--knob {pair}: write it as key=value")
    try:
        return name.strip(), json.loads(text)
    except ValueError:
        return name.strip(), text
