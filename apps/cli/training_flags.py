"""Flags that every command that trains in one process takes, and `--knob`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

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


def knobs(pairs: Iterable[str] | None) -> dict[str, Any]:
    """`key=value` pairs as knobs, each value JSON or else text. Raises ConfigError for one without an equals sign."""
    return dict(_knob(pair) for pair in pairs or [])


def _knob(pair: str) -> tuple[str, Any]:
    name, equals, text = pair.partition("=")
    if not equals:
        raise ConfigError(f"--knob {pair}: write it as key=value")
    try:
        return name.strip(), json.loads(text)
    except ValueError:
        return name.strip(), text
