"""Which items a step trains: a pure function of the seed, so that a run can go on anywhere.

Each epoch goes through all items but those held out, in an order of its own; its last batch may be smaller, and no item
is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millrace.trainers.errors import BadConfiguration


@dataclass(frozen=True, slots=True)
class ItemOrder:
    """Of `count` items in batches of `batch`; `holdout`: the share of them that is held out, at least one item where
    it is above 0."""

    count: int
    batch: int
    seed: int
    holdout: float = 0.0

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise BadConfiguration(f"a batch of {self.batch} items trains nothing")
        if not 0 <= self.holdout < 1:
            raise BadConfiguration(f"holdout {self.holdout} must be in [0, 1)")
        if self._holdout_count >= self.count:
            raise BadConfiguration(f"{self.count} items with a share of {self.holdout} held out leave none to train")

    @property
    def _holdout_count(self) -> int:
        return max(1, round(self.holdout * self.count)) if self.holdout else 0

    @property
    def steps(self) -> int:
        """Batches of an epoch."""
        return -(-(self.count - self._holdout_count) // self.batch)

    @property
    def held_out(self) -> list[int]:
        """Items that never train, in order."""
        return sorted(int(i) for i in self._shuffle()[: self._holdout_count])

    def items(self, step: int) -> list[int]:
        """The items of step 0, 1, ... over all epochs."""
        epoch, place = divmod(step, self.steps)
        pool = np.sort(self._shuffle()[self._holdout_count :])
        draw = np.random.Generator(np.random.PCG64([self.seed, 1, epoch]))
        batch = draw.permutation(pool)[place * self.batch : (place + 1) * self.batch]
        return [int(i) for i in batch]

    def _shuffle(self) -> NDArray[np.int64]:
        return np.random.Generator(np.random.PCG64([self.seed, 0])).permutation(self.count)
