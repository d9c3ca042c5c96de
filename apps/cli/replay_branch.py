"""`millrace replay branch`: a new policy from history."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from millrace.apps.cli.context import call, entry
from millrace.apps.cli.offline import Batch, Clip, Decay, Device, Epochs, Fall, Floor, Knobs, Rate, Seed, Steps, Warmup
from millrace.infra.errors import ConfigError
from millrace.infra.log.base import Place


def branch(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="of the new policy")],
    from_version: Annotated[
        int | None, typer.Option("--from-version", min=0, help="where it begins; default: the newest version")
    ] = None,
    algorithm: Annotated[
        str,
        typer.Option(
            help="sft (the best of each group), grpo, rloo, decoupled, tis, icepop, m2po, dpo, ipo, distill-forward or "
            "distill-reverse"
        ),
    ] = "sft",
    places: Annotated[
        Path | None,
        typer.Option(
            help="learn from the trajectories at these places only: a CSV or JSON-lines file with the columns topic, "
            "part and off, as SQL over the table of trajectories gives them",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    rewards: Annotated[
        str, typer.Option(metavar="SOURCE[/RUBRIC]", help="take rewards that a replay gave instead of the sealed ones")
    ] = "",
    teacher: Annotated[
        Path | None, typer.Option(help="model to distill from, of the same vocabulary", exists=True, file_okay=False)
    ] = None,
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
    save_every: Annotated[int, typer.Option(min=1, help="batches of a version")] = 10,
    keep: Annotated[int, typer.Option(min=1, help="newest versions whose files are kept, beside version 0")] = 2,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="train though too few sequences would carry the gradient")
    ] = False,
    device: Device = None,
) -> None:
    """Train a new policy from the configured policy's history, with no engine running.

    Evaluation traffic, content that may not train and samples without exact tokens are never learned from, whatever was
    asked. Methods that weigh by ratios first print how far the selection is from the starting weights. The same command
    goes on after a kill. Engines serve the new policy, `evaluate` scores it and `audit` proves it, with
    --set policy.name=NAME."""
    options: dict[str, Any] = {
        each: value
        for each, value in context.params.items()
        if each not in ("from_version", "algorithm", "places", "knob")
    }
    options |= {"version": from_version, "method": algorithm, "knobs": dict(_knob(pair) for pair in knob or [])}
    named = None if places is None else list(read_places(places))
    if places is not None:
        options["selection"] = f"places of {places.name}"
    made = entry("millrace.consumers.replay.branch.job:Options")(**options)
    entry("millrace.consumers.replay.branch.command:branch")(call(context).settings(), made, places=named)


def read_places(path: Path) -> Iterator[Place]:
    """Places from rows of topic, part and off. Raises ConfigError naming the line that is none."""
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    rows: Iterator[Any]
    if lines and lines[0].lstrip().startswith("{"):
        rows = (_json(line, number, path) for number, line in enumerate(lines, 1))
    else:
        rows = csv.DictReader(lines)
    for number, row in enumerate(rows, 1):
        try:
            yield Place(str(row["topic"]), int(row["part"]), int(row["off"]))
        except (KeyError, TypeError, ValueError):
            raise ConfigError(f"{path}, row {number} is no place: it needs the columns topic, part and off") from None


def _json(line: str, number: int, path: Path) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        raise ConfigError(f"{path}, row {number} is no JSON") from None


def _knob(pair: str) -> tuple[str, Any]:
    name, equals, text = pair.partition("=")
    if not equals:
        raise ConfigError(f"--knob {pair}: write it as key=value")
    try:
        return name.strip(), json.loads(text)
    except ValueError:
        return name.strip(), text
