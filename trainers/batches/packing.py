"""Packs samples into 1-D micro-batches with block-diagonal causal attention, without padding.

A micro-batch is one row of concatenated samples; positions restart at each. Samples of equal length lie side by side as
a `SampleRun`, which attention folds into a dense batch (`attention.py`), so no token attends across samples and no mask
matrix exists. Only positions that predict a trainable token get logits: `at` are those positions, `labels` the tokens
they predict, and every per-token column (behaviour log-probability, version, advantage, scores ...) is indexed alike.
So nothing is ever rolled.

Invariants: what is packed together, and in which order, depends on the samples alone, never on the order they came in
nor on what is attached later; every trainable token of a sample appears exactly once over the micro-batches; groups
that must stay together (`whole`) do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from millrace.trainers.batches import tree
from millrace.trainers.batches.bins import divide
from millrace.trainers.batches.sample import Sample
from millrace.trainers.errors import BadConfiguration

Floats = NDArray[np.float32]

ADVANTAGES, KEEP, PROXIMAL = "advantages", "keep", "proximal"
"""Columns: advantages; 0 where a trainable token must not pull; log-probabilities of the weights a batch started
from."""
REFERENCE, TEACHER = "reference", "teacher"
"""Columns: log-probabilities of the frozen reference and of the teacher."""
REWARD_MODEL = "reward_model"
"""What a frozen reward model says of each whole sample."""
VALUES, RETURNS, SIDE = "values", "returns", "side"
"""Columns: what a critic predicted before a token; what it should have; +1 chosen, -1 rejected, 0 no pair."""


@dataclass(frozen=True, slots=True)
class SampleRun:
    """`count` stretches of `length` tokens each, from `start` on in the packed row: samples, or what they add to a
    beginning of `prefix` tokens that they share with others."""

    start: int
    count: int
    length: int
    prefix: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """T packed tokens of S samples, of which M predict a trainable token.

    tokens, positions int64[1, T]; at, labels int64[M]; behaviour float32[M]; versions int64[M]; owners int64[M], which
    sample a token belongs to; ends int64[S], where a sample's last token lies; groups int64[S], which of the
    micro-batch's groups a sample belongs to. columns: float32[M] by name, attached once they are known. v_prox: version
    of the weights that the batch started from; v_theta: of those that train, between v_prox and v_prox + 1.
    Where samples share beginnings (`tree.py`), T counts these once, and paths int64[P] has, of each stretch of each run
    with a prefix, the places of prefix and stretch in the row.
    """

    members: tuple[Sample, ...]
    tokens: torch.Tensor
    positions: torch.Tensor
    runs: tuple[SampleRun, ...]
    at: torch.Tensor
    labels: torch.Tensor
    behaviour: torch.Tensor
    versions: torch.Tensor
    owners: torch.Tensor
    ends: torch.Tensor
    groups: torch.Tensor
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    v_prox: float = 0.0
    v_theta: float = 0.0
    paths: torch.Tensor | None = None
    shared: bool = False
    """whether beginnings that samples have in common were looked for"""

    @property
    def trainable(self) -> int:
        """M, counted before `keep`: what denominators use."""
        return int(self.labels.numel())

    @property
    def length(self) -> int:
        """T, without the idle token."""
        return int(self.tokens.numel()) if self.members else 0

    @property
    def samples(self) -> int:
        """S."""
        return len(self.members)

    def column(self, name: str) -> torch.Tensor:
        """An attached column (nothing, of an empty micro-batch); BadConfiguration when nobody attached it."""
        if not self.members:
            return self.behaviour
        try:
            return self.columns[name]
        except KeyError:
            raise BadConfiguration(f"{name} is not attached to the micro-batch; score and weigh it first") from None

    @property
    def advantages(self) -> torch.Tensor:
        """float32[M]."""
        return self.column(ADVANTAGES)

    @property
    def keep(self) -> torch.Tensor:
        """float32[M], 1 where a token pulls."""
        return self.column(KEEP)

    def attach(self, **columns: torch.Tensor) -> MicroBatch:
        """The same micro-batch with more columns, each float32[M]."""
        return replace(self, columns={**self.columns, **columns})

    def attach_samples(self, of: Mapping[Sample, Mapping[str, Floats]]) -> MicroBatch:
        """The same with the columns that each of its samples has, float32 over the sample's trainable tokens."""
        names = dict.fromkeys(name for member in self.members for name in of[member])
        rows = {name: np.concatenate([of[member][name] for member in self.members]) for name in names}
        return self.attach(**{name: torch.from_numpy(row.astype(np.float32, copy=False)) for name, row in rows.items()})

    def split(self, column: torch.Tensor) -> dict[Sample, Floats]:
        """A column float32[M] by sample."""
        bounds = np.cumsum([member.trainable for member in self.members])[:-1]
        return dict(zip(self.members, np.split(column.numpy(), bounds), strict=True)) if self.members else {}

    def to(self, device: torch.device) -> MicroBatch:
        """The same micro-batch on `device`."""
        tensors = {name: getattr(self, name).to(device) for name in _TENSORS}
        paths = None if self.paths is None else self.paths.to(device)
        return replace(
            self, **tensors, paths=paths, columns={name: column.to(device) for name, column in self.columns.items()}
        )


_TENSORS = ("tokens", "positions", "at", "labels", "behaviour", "versions", "owners", "ends", "groups")


def cut(
    samples: Sequence[Sample],
    budget: int,
    *,
    unite: bool = False,
    packing: str = "sequential",
    least: int = 1,
    share: bool = False,
    rows: bool = False,
) -> list[list[Sample]]:
    """Micro-batches of at most `budget` tokens (what is longer goes alone), trainable samples only, packed as
    `bins.divide` says; sequentially, in canonical order.

    unite: the samples of a seq stay together. least: so many micro-batches if there are samples for them. share: tokens
    count once that samples of a seq begin with alike, and these stay together as far as the budget goes. rows: each
    sample lies in a row of its own, and what fills it up to the longest counts too."""
    in_order = sorted((sample for sample in samples if sample.trainable), key=_canonical)
    units = [[sample] for sample in in_order]
    if unite or share:
        by_seq: dict[int, list[Sample]] = {}
        for sample in sorted(in_order, key=lambda sample: sample.seq):
            by_seq.setdefault(sample.seq, []).append(sample)
        units = list(by_seq.values())
    if share and not unite:
        units = [
            [unit[index] for index in piece]
            for unit in units
            for piece in tree.pieces([sample.tokens for sample in unit], budget)
        ]
    sizes = [tree.size([s.tokens for s in unit]) if share else sum(sample.length for sample in unit) for unit in units]
    bins = divide(sizes, budget, packing=packing, least=least)
    if rows:
        bins = [piece for members in bins for piece in _row_pieces(members, units, budget)]
    return [[sample for index in members for sample in units[index]] for members in bins]


def _row_pieces(members: Sequence[int], units: Sequence[Sequence[Sample]], budget: int) -> list[list[int]]:
    """A bin of units in pieces whose samples, each as long as the piece's longest, are within the budget; a unit that
    is over it goes alone."""
    pieces: list[list[int]] = []
    count = longest = 0
    for index in sorted(members, key=lambda index: (max(sample.length for sample in units[index]), index)):
        count, longest = count + len(units[index]), max(longest, *(sample.length for sample in units[index]))
        if not pieces or count * longest > budget:
            pieces.append([])
            count, longest = len(units[index]), max(sample.length for sample in units[index])
        pieces[-1].append(index)
    return pieces


def _canonical(sample: Sample) -> tuple[int, int, str, int]:
    return sample.length, sample.seq, sample.trajectory, sample.lineage


def pack(samples: Sequence[Sample], *, share: bool = False) -> MicroBatch:
    """One micro-batch of `samples`, which may be empty: then one idle token that trains nothing keeps collectives
    aligned. share: beginnings that samples have in common lie in it once."""
    in_order = sorted(samples, key=_canonical)
    if not in_order:
        return _idle()
    lengths = [sample.length for sample in in_order]
    masks = [np.flatnonzero(sample.mask) for sample in in_order]
    row = _tree([sample.tokens for sample in in_order]) if share else _flat(lengths)
    tokens = np.zeros(1 + max(int(places[-1]) for places in row.places), np.int64)
    for sample, places in zip(in_order, row.places, strict=True):
        tokens[places] = sample.tokens
    positions = np.zeros_like(tokens)
    for places in row.places:
        positions[places] = np.arange(len(places))
    local = {seq: index for index, seq in enumerate(sorted({sample.seq for sample in in_order}))}

    def column(of: str) -> NDArray[np.float32]:
        return np.concatenate([getattr(sample, of)[mask] for sample, mask in zip(in_order, masks, strict=True)])

    return MicroBatch(
        members=tuple(in_order),
        tokens=torch.from_numpy(tokens)[None],
        positions=torch.from_numpy(positions)[None],
        runs=tuple(row.runs),
        at=torch.from_numpy(np.concatenate([p[mask - 1] for p, mask in zip(row.places, masks, strict=True)])),
        labels=torch.from_numpy(column("tokens").astype(np.int64)),
        behaviour=torch.from_numpy(column("logprobs").astype(np.float32)),
        versions=torch.from_numpy(column("versions").astype(np.int64)),
        owners=torch.from_numpy(np.repeat(np.arange(len(in_order)), [len(mask) for mask in masks])),
        ends=torch.tensor([int(places[-1]) for places in row.places]),
        groups=torch.tensor([local[sample.seq] for sample in in_order]),
        paths=None if row.paths is None else torch.from_numpy(row.paths),
        shared=share,
    )


@dataclass(frozen=True, slots=True)
class _Row:
    """places: where each sample's tokens lie."""

    places: Sequence[NDArray[np.int64]]
    runs: list[SampleRun]
    paths: NDArray[np.int64] | None = None


def _flat(lengths: Sequence[int]) -> _Row:
    bounds = np.cumsum([0, *lengths])
    return _Row([np.arange(lo, hi) for lo, hi in pairwise(bounds)], _runs([(0, length) for length in lengths]))


def _tree(samples: Sequence[NDArray[np.int32]]) -> _Row:
    layout = tree.layout(samples)
    paths = [layout.places[branch.sample] for branch in layout.branches if branch.prefix]
    runs = _runs([(branch.prefix, branch.length) for branch in layout.branches])
    return _Row(layout.places, runs, np.concatenate(paths) if paths else None)


def _runs(shapes: Sequence[tuple[int, int]]) -> list[SampleRun]:
    """(prefix, length) of each stretch of the row."""
    runs: list[SampleRun] = []
    start = 0
    for prefix, length in shapes:
        if runs and (runs[-1].prefix, runs[-1].length) == (prefix, length):
            runs[-1] = replace(runs[-1], count=runs[-1].count + 1)
        else:
            runs.append(SampleRun(start, 1, length, prefix))
        start += length
    return runs


def _idle() -> MicroBatch:
    zero, no_tokens = torch.zeros((1, 1), dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    return MicroBatch(
        (),
        zero,
        zero.clone(),
        (SampleRun(0, 1, 1),),
        no_tokens,
        no_tokens,
        torch.zeros(0),
        no_tokens,
        no_tokens,
        no_tokens,
        no_tokens,
    )
