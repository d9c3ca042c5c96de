"""The exact samples of a step in a folder: what each rank trains on, and in which order.

    step.json             which version, from which parent, minibatches, cells, and what is said of each sample
    samples.safetensors   tokens int32[N], mask uint8[N], logprobs float32[N], versions int32[N]: samples end to end

Invariant: what is read back is what was written, bit for bit; a reward is a JSON number that keeps all of its bits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from millrace.infra.errors import ProofError
from millrace.trainers.batches.sample import Sample

STEP, SAMPLES = "step.json", "samples.safetensors"
_ARRAYS: Mapping[str, Any] = {"tokens": np.int32, "mask": np.uint8, "logprobs": np.float32, "versions": np.int32}
_SAID = ("seq", "group", "trajectory", "lineage", "reward", "truncated")


@dataclass(frozen=True, slots=True)
class Material:
    """A step that trains `parent` into `parent` + 1. minibatches: seqs of the whole batch in training order; cells: by
    seq; oldest: tokens of an older version are masked; lost: why the learner could not read a group, by seq."""

    parent: int
    minibatches: list[list[int]]
    cells: dict[int, int]
    oldest: int | None
    lost: dict[int, str]
    samples: list[Sample]

    @property
    def version(self) -> int:
        return self.parent + 1

    def share(self, cell: int) -> list[Sample]:
        """What the ranks of a cell train on."""
        return [sample for sample in self.samples if self.cells[sample.seq] == cell]

    def write(self, folder: Path, **more: Any) -> None:
        """Into an existing folder; `more` goes into step.json beside what a step needs."""
        said = {
            **more,
            "parent": self.parent,
            "minibatches": self.minibatches,
            "cells": self.cells,
            "oldest": self.oldest,
            "lost": self.lost,
            "samples": [
                {**{name: getattr(sample, name) for name in _SAID}, "length": sample.length} for sample in self.samples
            ],
        }
        (folder / STEP).write_text(json.dumps(said, indent=1) + "\n")
        save_file({name: _joined(self.samples, name, kind) for name, kind in _ARRAYS.items()}, folder / SAMPLES)


def _joined(samples: Sequence[Sample], name: str, kind: Any) -> Any:
    return np.concatenate([np.zeros(0, kind), *(getattr(sample, name) for sample in samples)]).astype(kind, copy=False)


def said(folder: Path) -> Mapping[str, Any]:
    """What step.json says. Raises ProofError where there is none."""
    try:
        found = json.loads((folder / STEP).read_bytes())
    except (OSError, ValueError) as error:
        raise ProofError(f"{folder} is no dumped step ({error}): name a folder of `replay prove --dump`") from error
    if not isinstance(found, dict):
        raise ProofError(f"{folder / STEP} holds no step: name a folder of `replay prove --dump`")
    return found


def read(folder: Path) -> Material:
    """The step in a folder. Raises ProofError for what is none, BadSample for samples that cannot be."""
    about = said(folder)
    try:
        arrays = load_file(folder / SAMPLES)
        ends = np.cumsum([row["length"] for row in about["samples"]])
        parts = [
            np.split(arrays[name].astype(kind, copy=False), ends[:-1])[: len(ends)] for name, kind in _ARRAYS.items()
        ]
        samples = [
            Sample(tokens, mask, logprobs, versions, **{name: row[name] for name in _SAID})
            for tokens, mask, logprobs, versions, row in zip(*parts, about["samples"], strict=True)
        ]
        return Material(
            parent=int(about["parent"]),
            minibatches=[list(map(int, seqs)) for seqs in about["minibatches"]],
            cells={int(seq): int(cell) for seq, cell in about["cells"].items()},
            oldest=about["oldest"],
            lost={int(seq): str(why) for seq, why in about["lost"].items()},
            samples=samples,
        )
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProofError(f"{folder} holds no whole step ({type(error).__name__}: {error}): dump it again") from error
