"""GRPO as one file, without knobs: what the default must equal to the last bit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from millrace.trainers.algorithms.base import Scores, Sums, TokenAlgorithm, Weights
from millrace.trainers.algorithms.normalisation import Reduce, alone
from millrace.trainers.batches.packing import Packed
from millrace.trainers.batches.sample import Sample


@dataclass(frozen=True)
class FormerGrpo(TokenAlgorithm):
    """Group mean and unbiased std with eps 1e-4, clip 0.2 / 0.28; decoupled: behaviour weight up to 2."""

    name = "grpo"
    measures = ("kept",)

    minibatches: int = 2
    decoupled: bool = False

    @property
    def needs(self) -> tuple[str, ...]:
        return ("proximal",) if self.decoupled else ()

    def weigh(
        self, samples: Sequence[Sample], oldest: int | None, scores: Scores | None = None, reduce: Reduce = alone
    ) -> Weights:
        groups: dict[str, dict[str, float]] = defaultdict(dict)
        for sample in sorted(samples, key=lambda s: (s.group, s.trajectory)):
            if sample.reward is not None:
                groups[sample.group][sample.trajectory] = sample.reward
        advantages: dict[str, float] = {}
        for rewards in groups.values():
            values = np.asarray(list(rewards.values()), np.float64)
            centred = values - values.mean()
            scaled = centred / (values.std(ddof=1) + 1e-4) if len(values) > 1 else centred * 0
            advantages |= dict(zip(rewards, scaled.tolist(), strict=True))
        out: Weights = {}
        for sample in samples:
            versions = sample.versions[sample.mask != 0]
            keep = np.ones(len(versions)) if oldest is None else versions >= oldest
            known = sample.trajectory in advantages
            out[sample] = {
                "advantages": np.full(len(versions), advantages.get(sample.trajectory, 0.0), np.float32),
                "keep": (keep * known).astype(np.float32),
            }
            if self.decoupled:
                assert scores is not None
                out[sample]["proximal"] = scores["proximal"][sample]
        return out

    def loss(self, logprobs: torch.Tensor, entropy: torch.Tensor, batch: Packed) -> tuple[torch.Tensor, Sums]:
        old, weight = batch.behaviour, torch.ones_like(batch.behaviour)
        if self.decoupled:
            old = batch.column("proximal")
            weight = torch.exp(old - batch.behaviour).clamp(max=2.0)
        ratio = torch.exp(logprobs - old)
        free = -batch.advantages * ratio
        clipped = -batch.advantages * ratio.clamp(1.0 - 0.2, 1.0 + 0.28)
        losses = weight * torch.maximum(free, clipped)
        return torch.where(batch.keep > 0, losses * batch.keep, 0.0).sum(), {"kept": batch.keep.sum()}
