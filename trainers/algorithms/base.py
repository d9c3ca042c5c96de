"""The seam of algorithms.

An algorithm weighs the samples of a batch (whole groups, on the rank that has them), then turns a forward pass of
packed tokens into one summed loss. It is pure: same samples and outputs, same answer. Invariants: `measures` names
every sum that a loss reports, on every rank and for empty micro-batches too, so that ranks add them up in one
collective; `weigh` calls `reduce` equally often on every rank, whatever it holds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

import torch

from millrace.trainers.algorithms.normalisation import Reduce, alone
from millrace.trainers.algorithms.rewards import RewardTable, recorded_rewards
from millrace.trainers.batches.packing import REFERENCE, REWARD_MODEL, TEACHER, Floats, MicroBatch
from millrace.trainers.batches.sample import Sample

Sums = Mapping[str, torch.Tensor]
Scores: TypeAlias = Mapping[str, Mapping[Sample, Floats]]
"""Column -> sample -> float32 over its trainable tokens; of critics, and the value after the last token besides.
Of reward models float32[1], or [0] where nothing of a sample trains."""
Weights: TypeAlias = dict[Sample, dict[str, Floats]]
"""Sample -> column -> float32 over its trainable tokens. Every sample has the same columns, `keep` among them."""


class Run(Protocol):
    """One forward pass of a micro-batch, as a backend offers it; gradients flow through it."""

    @property
    def batch(self) -> MicroBatch:
        """The micro-batch, on the device."""

    def tokens(self, temperature: float, *, entropy_learns: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities float32[M] of the labels, and entropies float32[M]: without gradient, unless
        `entropy_learns`."""

    def comparison(
        self, temperature: float, of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What `of` makes of the log-probabilities of the whole vocabulary at some labels, this model's (with gradient)
        and the teacher's (without), float32[n, V] each -> float32[n]: of all labels, float32[M]. And entropies of this
        model, float32[M], without gradient."""

    def values(self) -> torch.Tensor:
        """What a value head says after each packed token, float32[T]."""


class Algorithm(ABC):
    """`whole`: groups must not be split over micro-batches."""

    whole: bool = False

    @property
    @abstractmethod
    def name(self) -> str:
        """What configurations call it."""

    @property
    @abstractmethod
    def measures(self) -> tuple[str, ...]:
        """The sums that a loss reports; `kept` divides them."""

    @property
    @abstractmethod
    def minibatches(self) -> int:
        """Optimizer steps a batch is cut into."""

    @property
    def temperature(self) -> float:
        """What the behaviour policy sampled with; logits are divided by it."""
        return 1.0

    @property
    def pulls(self) -> bool:
        """Whether advantages are all that it learns from, so that a batch where each is 0 teaches nothing."""
        return False

    @property
    def needs(self) -> tuple[str, ...]:
        """What is scored before a batch is weighed: proximal, reference, teacher, values, reward_model."""
        return ()

    @property
    def holds(self) -> tuple[str, ...]:
        """Frozen models that must live beside the policy."""
        return tuple(name for name in self.needs if name in (REFERENCE, TEACHER, REWARD_MODEL))

    @property
    def critic(self) -> Algorithm | None:
        """What a value model learns beside the policy, if one does."""
        return None

    def accept(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples that are trained at all. The others are counted nowhere."""
        return list(samples)

    def trained_rewards(self, samples: Sequence[Sample], scores: Scores) -> RewardTable:
        """The reward that each trajectory is trained with, where it has one."""
        return recorded_rewards(samples)

    @abstractmethod
    def weigh(
        self, samples: Sequence[Sample], oldest: int | None, scores: Scores | None = None, reduce: Reduce = alone
    ) -> Weights:
        """What each sample's tokens are worth, and which of them may pull. oldest: tokens of an older version may
        not."""

    @abstractmethod
    def evaluate(self, run: Run) -> tuple[torch.Tensor, Sums]:
        """The summed loss of a micro-batch, with gradient, and the sums to report."""

    def count(self, batch: MicroBatch) -> float:
        """What `batch` adds to the loss's denominator."""
        return float(batch.trainable)


class TokenAlgorithm(Algorithm):
    """An algorithm that sees log-probabilities of the sampled tokens only."""

    @property
    def entropy_learns(self) -> bool:
        """Whether entropies have a gradient, which needs the memory of a second distribution."""
        return False

    @abstractmethod
    def loss(self, logprobs: torch.Tensor, entropy: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
        """float32[M] log-probabilities (with gradient) and entropies (without, unless `entropy_learns`) of `batch` ->
        summed loss and sums to report."""

    def evaluate(self, run: Run) -> tuple[torch.Tensor, Sums]:
        return self.loss(*run.tokens(self.temperature, entropy_learns=self.entropy_learns), run.batch)
