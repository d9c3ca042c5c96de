"""The seam of backends: a model and its optimizer, spread over the ranks of a process group that comes and goes.

One process lives through many groups: form, load, (score, step, gather ...), tear_down, form again with other peers.

Invariants every sibling keeps:
- `load` uses no collective, so a rank that fails in it never leaves the others waiting.
- Ranks of one cell (tensor, pipeline, context parallel) get the same micro-batches and answer alike; `data_rank` says
  which cell. A step's gradient is the sum over all cells and micro-batches divided once by `denominator`: how a
  minibatch is cut over cells and micro-batches, and how a cell splits the model, changes results by rounding alone. The
  same layout with the same batches gives identical bytes.
- A non-finite loss or gradient leaves weights and optimizer as they were, on every rank alike.
- All ranks call score and step with the same number of micro-batches.
- After tear_down nothing holds the group: its sockets are closed even if a reference to it survives somewhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.distributed_c10d import Store

from millrace.trainers.algorithms.base import Algorithm
from millrace.trainers.backends.layout import ACTOR, CRITIC, Layout
from millrace.trainers.batches.packing import MicroBatch
from millrace.trainers.phase_clock import Clock
from millrace.trainers.weights.state import State


@dataclass(frozen=True, slots=True)
class Adam:
    """AdamW's constants; the learning rate comes with each step. clip: largest global gradient norm."""

    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 1.0


@dataclass(frozen=True, slots=True)
class StepResult:
    """Of one optimizer step, over all ranks. loss: token mean; grad_norm: before clipping; sums: the algorithm's
    measures; applied: False when it was skipped as non-finite. tokens and samples: what this rank's cell computed."""

    loss: float
    grad_norm: float
    sums: dict[str, float]
    applied: bool
    tokens: int
    samples: int


class Backend(ABC):
    """A model in training. Not thread-safe, except `abort`. `parallel`: how one cell is laid out; its d is not used,
    since `form` derives it from the ranks that come."""

    layout: str = ""
    """As the ledger names it, such as torch:d2; empty before `form`."""
    adapters: bool = False
    """Whether it can train the adapter of a state (LoRA)."""
    shares_prefixes: bool = False
    """Whether it takes micro-batches whose samples share beginnings."""
    rank: int = 0
    world: int = 1
    parallel: Layout
    clock: Clock
    first: int = 0
    """Ranks of the world before this backend's, where it has a part of one; devices are counted over all."""
    acts: bool = True
    """Whether this rank trains a share of each batch; one that serves another role has none."""

    def plays(self, role: str) -> bool:
        """Whether this rank holds a part of a role's model, so that `hold` wants its state here."""
        return True

    @property
    def kernels(self) -> dict[str, str]:
        """What the policy computes with on this rank, by what it is for: attention, fusion, optimizer, repeatable."""
        return {}

    def room(self) -> int | None:
        """Tokens of the longest row that a step of the policy has room for on this rank's device; None where nothing
        says. All ranks call it, since it may compute."""
        return None

    @property
    def fills_rows(self) -> bool:
        """Whether the policy computes each sample in a row of its own, filled up to the longest of its micro-batch."""
        return False

    def apart(self, role: str) -> bool:
        """Whether a role has ranks of its own, beside the actor's."""
        return False

    @property
    def data_rank(self) -> int:
        """Which cell this rank belongs to: which of the `data_world` shares of a batch it trains."""
        return self.rank

    @property
    def data_world(self) -> int:
        """Cells of ranks that hold the whole model together."""
        return self.world

    @abstractmethod
    def form(self, rank: int, world: int, store: Store | None, timeout: float) -> None:
        """Joins a process group of `world` ranks that meet in `store`; no collective waits longer than `timeout`
        seconds. A world of 1 needs no group and no store. Tears down what was formed before. BadConfiguration when so
        many ranks make no layout."""

    @abstractmethod
    def load(self, state: State) -> None:
        """Builds model and optimizer from `state`, this rank's part of it; its critic too, where it has one. Forgets
        what was loaded and held before. No collective."""

    @abstractmethod
    def hold(self, role: str, state: State) -> None:
        """Builds the model of `state` beside the others, frozen: a reference, a teacher or a reward model. No
        collective."""

    @abstractmethod
    def score(self, micros: Sequence[MicroBatch], temperature: float, role: str = ACTOR) -> list[torch.Tensor]:
        """Log-probabilities float32[M] of the labels of each micro-batch under a role's weights as they are."""

    @abstractmethod
    def values(self, micros: Sequence[MicroBatch], role: str = CRITIC) -> list[torch.Tensor]:
        """What the scalar head of a role says after each packed token, float32[T]."""

    @abstractmethod
    def step(
        self, micros: Sequence[MicroBatch], algorithm: Algorithm, denominator: float, lr: float, role: str = ACTOR
    ) -> StepResult:
        """One optimizer step of a role on a minibatch, of which `micros` are this rank's cell's. `denominator`: over
        all cells."""

    @abstractmethod
    def sum(self, values: Sequence[float]) -> list[float]:
        """Adds each value up over the cells, in float64; the ranks of a cell give equal values, which count once."""

    @abstractmethod
    def max(self, values: Sequence[float]) -> list[float]:
        """The largest of each value over all ranks of the world, those that serve a role too."""

    @abstractmethod
    def announce(self, message: bytes | None) -> bytes:
        """Rank 0's message, of any length, on all ranks of the world; the others give None."""

    @abstractmethod
    def gather(self) -> State | None:
        """The full state on rank 0, None on the others. All ranks call it."""

    def begin_gather(self) -> Callable[[], State] | None:
        """`gather` for a caller that trains on at once: on rank 0, what waits for the state and gives it, from any
        thread. The state is that of this call, whatever steps follow. Where a backend copies beside its next step it
        overrides this."""
        state = self.gather()
        return None if state is None else lambda: state

    @abstractmethod
    def tear_down(self) -> None:
        """Leaves the group, closes its sockets, forgets model and optimizer. May be called at any time, any number of
        times."""

    @abstractmethod
    def abort(self) -> None:
        """Makes a collective that blocks in this process fail now. From any thread."""

    @property
    @abstractmethod
    def steps(self) -> int:
        """Optimizer steps applied so far, over the whole run."""

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Token ids are below it."""

    @property
    @abstractmethod
    def longest(self) -> int:
        """Tokens that a sample may have."""
