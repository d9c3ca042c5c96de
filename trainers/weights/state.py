"""The whole state of a training run at a version: what a checkpoint holds and what a backend loads and gathers.

Invariants: tensors are full (not sharded), on the CPU and fp32, under the model's own names (not those of its files),
so any number of ranks can load them. Randomness is counter based: a step seeds itself from (seed, step, rank), so these
numbers are all there is to keep of the RNG, whatever the number of ranks before and after.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from millrace.trainers.errors import CheckpointError
from millrace.trainers.weights.adapter import Adapter


@dataclass(frozen=True, slots=True)
class State:
    """weights[name]: a parameter that learns; moments[slot][name]: what the optimizer keeps of it (exp_avg,
    exp_avg_sq); constants[name]: what the model's files hold beside, which never changes (`conversion.py`).

    moments is empty before the first step. `step` counts applied optimizer steps. `assets` are the other files of the
    Hugging Face layout (config.json, tokenizer, chat template, generation config), passed on from version to version.
    `critic` is the state of the value model that learns beside the policy, where there is one.

    With an `adapter`, `weights` are its frozen base, and moments are of the adapter alone. `source` is the model
    directory that `weights` were read from, where there is one.
    """

    weights: Mapping[str, torch.Tensor]
    assets: Mapping[str, bytes]
    moments: Mapping[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    step: int = 0
    seed: int = 0
    critic: State | None = None
    adapter: Adapter | None = None
    source: Path | None = None
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Weights and constants: all that the model is built of."""
        return {**self.weights, **self.constants}


def dtype_of(assets: Mapping[str, bytes]) -> torch.dtype:
    """The dtype in which config.json wants weights published. Raises CheckpointError where it is none."""
    settings = json.loads(assets["config.json"])
    name = str(settings.get("dtype") or settings.get("torch_dtype") or "float32")
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"config.json names dtype {name!r}, which is none; write float32 or bfloat16")
    return dtype
