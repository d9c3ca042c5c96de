"""Where two versions differ first, and how far their weights are from each other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from millrace.trainers.errors import CorruptCheckpoint
from millrace.trainers.weights import checkpoint
from millrace.trainers.weights.state import State

TOLERANCE = 1e-5
"""largest relative difference of the weights after one step in another layout, or with other libraries"""


def first_file(record: Mapping[str, str], files: Mapping[str, str]) -> str:
    """The first file that differs, in words, weights first. Both: name -> sha256 hex."""
    names = sorted({*record, *files}, key=lambda name: (name != checkpoint.WEIGHTS, name))
    for name in names:
        if name not in files:
            return f"{name} is missing"
        if name not in record:
            return f"{name} is not among the recorded files"
        if record[name] != files[name]:
            return f"{name} differs"
    return "the manifest differs"


def first_tensor(record: Path, directory: Path) -> str | None:
    """The first tensor that differs between two directories, in words; None where no file of tensors says so."""
    files = (checkpoint.WEIGHTS, checkpoint.ADAPTER, checkpoint.MOMENTS, checkpoint.CRITIC)
    for file in files:
        if not ((record / file).is_file() and (directory / file).is_file()):
            continue
        try:
            one, two = load_file(record / file), load_file(directory / file)
        except (OSError, SafetensorError):
            continue
        for name in sorted({*one, *two}):
            if name not in one or name not in two:
                return f"{file}: tensor {name} is in one of them alone"
            if one[name].shape != two[name].shape:
                return f"{file}: tensor {name} has another shape"
            if not torch.equal(one[name], two[name]):
                differ = (one[name] != two[name]).float()
                farthest = (one[name].double() - two[name].double()).abs().max()
                return (
                    f"{file}: tensor {name} differs in {int(differ.sum()):,} of {differ.numel():,} numbers, by "
                    f"{float(farthest):.3g} at most"
                )
    return None


def relative(record: Path, directory: Path) -> float:
    """How far the weights of two directories are from each other: the norm of the difference over that of the
    recorded ones, a critic's among them. Raises CheckpointError for what cannot be read."""
    one, two = checkpoint.read(record, verify=False), checkpoint.read(directory, verify=False)
    apart = total = 0.0
    for name, (first, second) in _pairs(one, two).items():
        if first is None or second is None or first.shape != second.shape:
            raise CorruptCheckpoint(f"{directory} and {record} hold different models: {name}")
        apart += float((first.double() - second.double()).square().sum())
        total += float(first.double().square().sum())
    return math.sqrt(apart / total) if total else math.sqrt(apart)


def _pairs(one: State, two: State) -> dict[str, tuple[torch.Tensor | None, torch.Tensor | None]]:
    first, second = _named_tensors(one), _named_tensors(two)
    return {name: (first.get(name), second.get(name)) for name in sorted({*first, *second})}


def _named_tensors(state: State) -> dict[str, torch.Tensor]:
    weights = state.adapter.weights if state.adapter is not None else state.weights
    critic = state.critic.weights if state.critic is not None else {}
    return {**weights, **{f"critic/{name}": tensor for name, tensor in critic.items()}}
