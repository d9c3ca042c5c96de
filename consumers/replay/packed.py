"""The micro-batches of a step as one rank trained them, in files that anything reads.

rank0.safetensors   <minibatch>/<micro-batch>/tokens, positions, at, labels, behaviour, versions, owners, ends,
                    groups and the columns (advantages, keep, ...): shapes as in `trainers.batches.packing.Packed`
rank0.json          of each minibatch: loss, gradient norm, learning rate, whether it was applied; its samples
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from millrace.trainers.backends.base import StepResult
from millrace.trainers.batches.packing import Packed

FIELDS = ("tokens", "positions", "at", "labels", "behaviour", "versions", "owners", "ends", "groups")


class StepRecorder:
    """Hears the optimizer steps of a rank, and writes them down."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._said: list[dict[str, Any]] = []

    def __call__(self, micros: Sequence[Packed], result: StepResult, lr: float) -> None:
        """Keep one step."""
        number = len(self._said)
        for index, micro in enumerate(micros):
            named = {name: getattr(micro, name) for name in FIELDS}
            for name, tensor in {**named, **micro.columns}.items():
                # A copy: columns share storage among each other, which the format refuses.
                self._tensors[f"{number}/{index}/{name}"] = tensor.detach().cpu().clone().contiguous()
        self._said.append(
            {
                "loss": result.loss,
                "grad_norm": result.grad_norm,
                "lr": lr,
                "applied": result.applied,
                "sums": result.sums,
                "micro_batches": [
                    [{"trajectory": s.trajectory, "lineage": s.lineage, "seq": s.seq} for s in micro.members]
                    for micro in micros
                ],
            }
        )

    def write(self, folder: Path, rank: int) -> None:
        """The files of this rank."""
        save_file(self._tensors, folder / f"rank{rank}.safetensors")
        (folder / f"rank{rank}.json").write_text(json.dumps(self._said, indent=1) + "\n")
