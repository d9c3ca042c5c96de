"""A step as a folder that trains without the log: for the ranks, and, dumped, to take a bad step apart.

    step.json             which version, from which parent, minibatches, cells, and what describes each sample
    samples.safetensors   tokens int32[N], mask uint8[N], logprobs float32[N], versions int32[N]: samples end to end

A dump has more:

    step.json                           also what is on record of the version
    versions/v11-<digest>/              the weights that the step begins with, and the base of an adapter
    rank0.safetensors, rank0.json ...   the micro-batches as they trained (`rank_worker`)
    result.json                         what came of it: digest, files, metrics

Invariants: what is read back is what was written, bit for bit; a reward is a JSON number that keeps all of its bits; a
dump has all that decides a bit, but for code, libraries, machine and frozen models, which it names.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from millrace.consumers.learner.version.collect import base_of
from millrace.consumers.replay.prove.version_history import RecordedVersion
from millrace.infra.errors import ProofError
from millrace.schemas.records import LedgerEntry
from millrace.trainers.batches.sample import Sample

STEP, SAMPLES = "step.json", "samples.safetensors"
_ARRAYS: Mapping[str, Any] = {"tokens": np.int32, "mask": np.uint8, "logprobs": np.float32, "versions": np.int32}
_OF_SAMPLE = ("seq", "group", "trajectory", "lineage", "reward", "truncated")
VERSIONS, RESULT = "versions", "result.json"
_ENTRY = (
    "policy", "version", "ranks", "layout", "unchanged", "digest", "libraries", "cpu",
    "config_hash", "code_hash", "metrics", "eta", "config", "models", "device", "threads",
)  # fmt: skip
"""fields of the ledger entry that a dump keeps"""


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """A step's outcome; of rank 0 with the directory that it wrote. files: name -> sha256 hex."""

    metrics: Mapping[str, float]
    unchanged: str | None
    path: Path | None = None
    digest: str = ""
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Material:
    """A step that trains `parent` into `parent` + 1. minibatches: seqs of the whole batch in training order; cells: by
    seq; oldest: tokens of an older version are masked; losses: why the learner could not read a group, by seq; budget:
    tokens of its rows, 0 where the record does not say."""

    parent: int
    minibatches: list[list[int]]
    cells: dict[int, int]
    oldest: int | None
    losses: dict[int, str]
    samples: list[Sample]
    budget: int = 0

    @property
    def version(self) -> int:
        return self.parent + 1

    def share(self, cell: int) -> list[Sample]:
        """What the ranks of a cell train on."""
        return [sample for sample in self.samples if self.cells[sample.seq] == cell]

    def write(self, folder: Path, **more: Any) -> None:
        """Into an existing folder; `more` goes into step.json beside what a step needs."""
        description = {
            **more,
            "parent": self.parent,
            "minibatches": self.minibatches,
            "cells": self.cells,
            "oldest": self.oldest,
            "lost": self.losses,
            "budget": self.budget,
            "samples": [
                {**{name: getattr(sample, name) for name in _OF_SAMPLE}, "length": sample.length}
                for sample in self.samples
            ],
        }
        (folder / STEP).write_text(json.dumps(description, indent=1) + "\n")
        save_file({name: _concatenate(self.samples, name, kind) for name, kind in _ARRAYS.items()}, folder / SAMPLES)


def _concatenate(samples: Sequence[Sample], name: str, kind: Any) -> Any:
    return np.concatenate([np.zeros(0, kind), *(getattr(sample, name) for sample in samples)]).astype(kind, copy=False)


def _description(folder: Path) -> Mapping[str, Any]:
    """The content of step.json. Raises ProofError where there is none."""
    try:
        description = json.loads((folder / STEP).read_bytes())
    except (OSError, ValueError) as error:
        raise ProofError(f"{folder} is no dumped step ({error}): name a folder of `replay prove --dump`") from error
    if not isinstance(description, dict):
        raise ProofError(f"{folder / STEP} holds no step: name a folder of `replay prove --dump`")
    return description


def read(folder: Path) -> Material:
    """The step in a folder. Raises ProofError for what is none, BadSample for samples that cannot be."""
    about = _description(folder)
    try:
        arrays = load_file(folder / SAMPLES)
        ends = np.cumsum([row["length"] for row in about["samples"]])
        parts = [
            np.split(arrays[name].astype(kind, copy=False), ends[:-1])[: len(ends)] for name, kind in _ARRAYS.items()
        ]
        samples = [
            Sample(tokens, mask, logprobs, versions, **{name: row[name] for name in _OF_SAMPLE})
            for tokens, mask, logprobs, versions, row in zip(*parts, about["samples"], strict=True)
        ]
        return Material(
            parent=int(about["parent"]),
            minibatches=[list(map(int, seqs)) for seqs in about["minibatches"]],
            cells={int(seq): int(cell) for seq, cell in about["cells"].items()},
            oldest=about["oldest"],
            losses={int(seq): str(why) for seq, why in about["lost"].items()},
            samples=samples,
            budget=int(about.get("budget", 0)),
        )
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProofError(f"{folder} holds no whole step ({type(error).__name__}: {error}): dump it again") from error


class Dump:
    """Steps under `folder`, each in a new folder of its own. Raises ProofError where one is there already."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def begin(self, version: RecordedVersion, step: Material, base: Path) -> Path:
        """Write down what the step trains on, from the weights in `base`; gives its folder."""
        folder = self._folder / f"v{version.number}"
        try:
            folder.mkdir(parents=True, mode=0o700)
        except FileExistsError:
            raise ProofError(f"{folder} is there already: name another folder for --dump, or remove it") from None
        entry: Mapping[str, Any] = version.entry
        step.write(
            folder,
            entry={name: entry[name] for name in _ENTRY},
            files=dict(version.weights["files"]),
            start=base.name,
        )
        for path in (base, *([base.parent / beside] if (beside := base_of(base)) else [])):
            # Copies: what is dumped is there to be changed, and the version must not be.
            shutil.copytree(path, folder / VERSIONS / path.name, dirs_exist_ok=True)
        return folder

    def end(self, folder: Path, outcome: TrainedStep) -> None:
        """Write down what came of it."""
        result = {
            "digest": outcome.digest,
            "files": dict(outcome.files),
            "unchanged": outcome.unchanged,
            "metrics": dict(outcome.metrics),
        }
        (folder / RESULT).write_text(json.dumps(result, indent=1) + "\n")


def on_record(folder: Path) -> tuple[LedgerEntry, Mapping[str, str], Path]:
    """What a dumped step says of its version: the ledger entry as far as it is kept, the files of the version (name ->
    sha256 hex), and the directory to begin with. Raises ProofError for what is no dumped step."""
    about = _description(folder)
    try:
        entry, files, start = about["entry"], about["files"], folder / VERSIONS / str(about["start"])
        missing = [name for name in _ENTRY if name not in entry]
    except (KeyError, TypeError) as error:
        raise ProofError(f"{folder / STEP} lacks {error}: dump the step again") from error
    if missing or not start.is_dir():
        raise ProofError(f"{folder} lacks {missing[0] if missing else start}: dump the step again")
    return cast(LedgerEntry, entry), files, start
