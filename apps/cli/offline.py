"""Commands that train from files alone: sft, dpo, reward-model, distill. They need no broker and no settings."""

from __future__ import annotations

from dataclasses import fields
from enum import StrEnum
from typing import Annotated, Any

import typer

from millrace.apps.cli.context import call, complain, console, entry
from millrace.apps.cli.training_flags import NO_DEFAULT, parse_knobs, with_options
from millrace.infra import telemetry_setup
from millrace.trainers.offline.job import Job

FIRST = ("model", "data", "out")
_NAMES = [field.name for field in fields(Job)]
TRAINING = _NAMES[_NAMES.index("knobs") : _NAMES.index("device")]
"""what every command takes: the fields of a job from `knobs` to the one before `device`"""
ADAPTER = ("lora_rank", "lora_alpha", "adapter_only")
LAST = ("tracker", "device")


class Preference(StrEnum):
    """What `dpo` learns by."""

    DPO = "dpo"
    IPO = "ipo"
    SIMPO = "simpo"
    ORPO = "orpo"
    KTO = "kto"


class Divergence(StrEnum):
    """What `distill` lowers."""

    FORWARD = "forward"
    REVERSE = "reverse"


@with_options(*FIRST, *TRAINING, *ADAPTER, *LAST)
def sft(context: typer.Context, **options: object) -> None:
    """Learn to say what the rows say: {"messages": [...]}, {"prompt", "completion"} or {"tokens", "mask"}."""
    _run("sft", context, options)


@with_options(*FIRST, "algorithm", "reference", *TRAINING, *ADAPTER, *LAST, lr=1e-6)
def dpo(
    context: typer.Context,
    algorithm: Annotated[Preference, typer.Option(help="dpo, ipo, simpo, orpo or kto")] = Preference.DPO,
    **options: object,
) -> None:
    """Learn to prefer what was chosen over what was rejected: rows of {"prompt", "chosen", "rejected"}; kto: what is
    good, rows of {"prompt", "completion", "label"}."""
    _run(algorithm.value, context, options)


@with_options(*FIRST, *TRAINING, *LAST)
def reward_model(context: typer.Context, **options: object) -> None:
    """Learn to score what was chosen above what was rejected: rows of {"prompt", "chosen", "rejected"}."""
    _run("reward-model", context, options)


@with_options(*FIRST, "teacher", "direction", "on_policy", "max_tokens", *TRAINING, *ADAPTER, *LAST, teacher=NO_DEFAULT)
def distill(
    context: typer.Context,
    direction: Annotated[Divergence, typer.Option(help="forward or reverse")] = Divergence.FORWARD,
    **options: object,
) -> None:
    """Learn a teacher's distributions, on replies that are given or on the student's own."""
    _run(f"distill-{direction.value}", context, options)


def _run(algorithm: str, context: typer.Context, options: dict[str, Any]) -> None:
    """Make a job of a command's options, and run it."""
    trackers = options.pop("tracker") or []
    options["knobs"] = parse_knobs(options["knobs"])
    telemetry_setup.setup(call(context).settings(), context.info_name or algorithm)
    entry("millrace.apps.cli.training:train")(algorithm, options, trackers, console, complain)
