"""Weighed micro-batches with scores, and the same batch padded to [B, S], as other libraries keep it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from millrace.trainers.algorithms.base import Algorithm, Scores
from millrace.trainers.batches.packing import PROXIMAL, REFERENCE, TEACHER, VALUES, MicroBatch, pack
from millrace.trainers.batches.sample import Sample


def draw_scores(samples: Sequence[Sample], seed: int = 0) -> Scores:
    """Scores of every kind, near the behaviour policy."""
    out: dict[str, dict[Sample, np.ndarray]] = {name: {} for name in (PROXIMAL, REFERENCE, TEACHER, VALUES)}
    for sample in samples:
        draw = np.random.default_rng([seed, sample.seq, int(sample.trajectory.split(".")[1]), sample.lineage])
        behaviour = sample.logprobs[sample.mask != 0]
        for name in (PROXIMAL, REFERENCE, TEACHER):
            out[name][sample] = (behaviour + draw.normal(0, 0.3, len(behaviour))).astype(np.float32)
        out[VALUES][sample] = draw.normal(0, 1, len(behaviour) + 1).astype(np.float32)
    return out


def weighed(
    algorithm: Algorithm, samples: Sequence[Sample], oldest: int | None = None, scores: Scores | None = None
) -> MicroBatch:
    """The whole of `samples` in one micro-batch, in float64."""
    weights = algorithm.weigh(samples, oldest, scores if scores is not None else draw_scores(samples))
    batch = pack(samples).attach_samples(weights)
    doubled = {name: column.double() for name, column in batch.columns.items()}
    return replace(batch, behaviour=batch.behaviour.double(), columns=doubled, v_prox=1.0, v_theta=1.5)


def current(batch: MicroBatch, seed: int = 7, spread: float = 0.3) -> torch.Tensor:
    """Log-probabilities of a policy near the behaviour policy, float64[M], the same for a sample wherever it lies."""
    rows = [
        np.random.default_rng([seed, m.seq, int(m.trajectory.split(".")[1]), m.lineage]).normal(0, spread, m.trainable)
        for m in batch.members
    ]
    return batch.behaviour.double() + torch.from_numpy(np.concatenate([np.zeros(0), *rows]))


@dataclass
class Padded:
    """[B, S] float64 at the positions that predict: everything is rolled left by one, the last column is zero."""

    samples: list[Sample]
    mask: torch.Tensor
    behaviour: torch.Tensor
    versions: torch.Tensor
    reward: torch.Tensor
    group: list[str]
    columns: dict[str, torch.Tensor]
    last_value: torch.Tensor

    @property
    def n(self) -> torch.Tensor:
        return self.mask.sum()


def padded(samples: Sequence[Sample], scores: Mapping[str, Mapping[Sample, np.ndarray]], **more: Mapping) -> Padded:
    """The batch in the padded form. more: other columns by sample over trainable tokens."""
    size, width = len(samples), max(s.length for s in samples)
    grids = {name: torch.zeros(size, width, dtype=torch.float64) for name in ("mask", "behaviour", "versions")}
    given = {**scores, **more}
    columns = {name: torch.zeros(size, width, dtype=torch.float64) for name in given}
    for row, s in enumerate(samples):
        at = torch.from_numpy(np.flatnonzero(s.mask)) - 1
        grids["mask"][row, at] = 1.0
        grids["behaviour"][row, at] = torch.from_numpy(s.logprobs[s.mask != 0].astype(np.float64))
        grids["versions"][row, at] = torch.from_numpy(s.versions[s.mask != 0].astype(np.float64))
        for name, of in given.items():
            columns[name][row, at] = torch.as_tensor(of[s][: len(at)]).double()
    last = torch.tensor([float(scores[VALUES][s][-1]) for s in samples], dtype=torch.float64)
    rewards = torch.tensor([s.reward for s in samples], dtype=torch.float64)
    return Padded(
        list(samples), **grids, reward=rewards, group=[s.group for s in samples], columns=columns, last_value=last
    )


def by_sample(batch: MicroBatch, column: torch.Tensor) -> dict[Sample, torch.Tensor]:
    """float64[M] by sample, gradient kept."""
    return dict(zip(batch.members, torch.split(column, [m.trainable for m in batch.members]), strict=True))
