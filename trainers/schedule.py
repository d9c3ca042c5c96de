"""The learning rate of each optimizer step.

    warm-up    lr (s + 1) / warmup                                   s < warmup steps applied so far
    constant   lr
    linear     lr (floor + (1 - floor) (1 - x))                      x = (s - warmup) / (total - warmup), at most 1
    cosine     lr (floor + (1 - floor) (1 + cos(pi x)) / 2)

It is a function of the applied steps alone, which checkpoints count: a run that stops and goes on has the same rates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from millrace.trainers.errors import BadConfiguration

Decay: TypeAlias = Literal["constant", "linear", "cosine"]
DECAYS = ("constant", "linear", "cosine")


@dataclass(frozen=True, slots=True)
class Schedule:
    """Linear warm-up over `warmup` optimizer steps to `lr`, then `decay` to `floor` (a share of lr) at step `total`,
    where it stays. `total` counts the warm-up; a constant rate needs none."""

    lr: float = 1e-5
    warmup: int = 0
    decay: Decay = "constant"
    total: int = 0
    floor: float = 0.0

    def __post_init__(self) -> None:
        if self.decay not in DECAYS:
            raise BadConfiguration(f"no learning rate schedule {self.decay!r}: choose one of {', '.join(DECAYS)}")
        if not 0 <= self.floor <= 1:
            raise BadConfiguration(f"the learning rate ends at {self.floor} of its peak: choose a share in 0..1")
        if self.decay != "constant" and self.total <= self.warmup:
            raise BadConfiguration(
                f"a {self.decay} schedule over {self.total} steps, {self.warmup} of them warm-up, has no step to fall "
                "in: set its total number of optimizer steps above its warm-up"
            )

    def at(self, step: int) -> float:
        """Of the optimizer step after `step` applied ones."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        if self.decay == "constant":
            return self.lr
        remaining = 1.0 - min(1.0, (step - self.warmup) / (self.total - self.warmup))
        if self.decay == "cosine":
            remaining = (1.0 - math.cos(math.pi * remaining)) / 2.0
        return self.lr * (self.floor + (1.0 - self.floor) * remaining)
