"""The description of a training from files. `millrace.trainers.offline.run` trains as it says.

Invariants: a job's fields are the one place of their names, types, defaults, bounds and descriptions, from which
`millrace sft`, `dpo`, `reward-model` and `distill` make their options; this module loads no torch, so that they say
what they take at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from typing_extensions import Doc

from millrace.trainers.schedule import Decay
from millrace.trainers.weights.adapter import Lora


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a number may be, both ends included; commands refuse others."""

    least: float | None = None
    most: float | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """One training from files. algorithm: one of `run.SHAPES`. on_policy replies are sampled at the algorithm's
    `temperature`. lora: learn an adapter of this kind only."""

    algorithm: str
    model: Annotated[Path, Doc("model to start from, in Hugging Face layout")]
    data: Annotated[Path, Doc("JSONL file, or directory that `datasets` saved")]
    out: Annotated[Path, Doc("directory for the versions")]
    reference: Annotated[Path | None, Doc("frozen model to compare with; default: --model")] = None
    teacher: Annotated[Path | None, Doc("model to learn from, of the same vocabulary")] = None
    on_policy: Annotated[bool, Doc("the student answers the prompts itself; replies are not read")] = False
    max_tokens: Annotated[int, Bounds(1), Doc("of a reply of the student")] = 256
    knobs: Annotated[Mapping[str, object], Doc("override a knob; may be repeated")] = field(default_factory=dict)
    steps: Annotated[int, Bounds(0), Doc("batches in all; 0: as many as the epochs have")] = 0
    epochs: Annotated[int, Bounds(1), Doc("times through the data")] = 1
    batch: Annotated[int, Bounds(1), Doc("rows of a batch")] = 32
    lr: Annotated[float, Doc("learning rate of AdamW")] = 1e-5
    warmup: Annotated[int, Bounds(0), Doc("optimizer steps over which the learning rate rises to lr")] = 0
    decay: Annotated[Decay, Doc("how lr goes on until the last batch: constant, linear or cosine")] = "constant"
    floor: Annotated[float, Bounds(0, 1), Doc("share of lr that linear and cosine fall to")] = 0.0
    weight_decay: Annotated[float, Bounds(0), Doc("weight decay of AdamW")] = 0.0
    max_grad_norm: Annotated[float, Doc("gradients are clipped to this norm")] = 1.0
    seed: Annotated[int, Bounds(0), Doc("of every random choice")] = 0
    budget: Annotated[int, Bounds(1), Doc("tokens of one packed row of a forward pass")] = 16384
    max_length: Annotated[int, Bounds(0), Doc("longest sequence in tokens; 0: what the model takes")] = 0
    holdout: Annotated[float, Bounds(0, 0.99), Doc("share of the rows that is only measured on")] = 0.0
    evaluate_every: Annotated[int, Bounds(0), Doc("batches between two measurements; 0: only before and after")] = 0
    save_every: Annotated[int, Bounds(0), Doc("batches between two versions; 0: one every 5 minutes, and the last")] = 0
    keep: Annotated[int, Bounds(1), Doc("newest versions whose files are kept")] = 2
    resume: Annotated[bool, Doc("go on from the newest version in --out")] = False
    strict: Annotated[bool, Doc("end at the first row that cannot be used")] = False
    bf16: Annotated[bool, Doc("layers compute in bfloat16; weights and losses stay fp32")] = False
    checkpointing: Annotated[bool, Doc("compute layers twice to save memory")] = False
    device: Annotated[str | None, Doc("cpu or cuda; default: what there is")] = None
    lora: Lora | None = None
