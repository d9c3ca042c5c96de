"""Which positions of a packed row a rank of the context dimension has.

A row is padded to a multiple of the ranks with tokens that see only themselves and train nothing, then cut into equal
consecutive slices. Every rank has the whole micro-batch, so each knows what the others have and nobody asks.

Invariants: every label is on exactly one rank, the one that has the position that predicts it; the cut depends on the
micro-batch alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from millrace.trainers.batches.packing import MicroBatch, SampleRun


def pad_row(batch: MicroBatch, multiple: int) -> MicroBatch:
    """The same micro-batch with its row filled up to a multiple; the fillers are samples of one token."""
    length = batch.tokens.shape[1]
    more = -length % multiple
    if more == 0:
        return batch
    return replace(
        batch,
        tokens=F.pad(batch.tokens, (0, more)),
        positions=F.pad(batch.positions, (0, more)),
        runs=(*batch.runs, SampleRun(length, more, 1)),
    )


@dataclass(frozen=True, slots=True)
class Slice:
    """A rank's part of a micro-batch. batch: its tokens, positions and labels, `at` counted from its first position,
    and the runs of the whole row, which attention needs; its per-token columns and members are the whole's and not to
    be used. labels: how many labels each rank has. order: where label i of the whole is among the ranks' labels one
    after another. length: tokens of the whole row before padding."""

    batch: MicroBatch
    labels: tuple[int, ...]
    order: torch.Tensor
    length: int


def take(batch: MicroBatch, rank: int, size: int) -> Slice:
    """What `rank` of `size` has of `batch`."""
    full_batch = pad_row(batch, size)
    width = full_batch.tokens.shape[1] // size
    start = rank * width
    owners = batch.at // width
    indexes = [torch.nonzero(owners == index)[:, 0] for index in range(size)]
    kept_rows = indexes[rank]
    local = replace(
        full_batch,
        tokens=full_batch.tokens[:, start : start + width],
        positions=full_batch.positions[:, start : start + width],
        at=batch.at[kept_rows] - start,
        labels=batch.labels[kept_rows],
    )
    order = torch.argsort(torch.cat(indexes))
    return Slice(local, tuple(len(index) for index in indexes), order, batch.tokens.shape[1])


def spans(counts: Sequence[int], rank: int) -> tuple[int, int]:
    """[lo, hi) of `rank`'s entries among all ranks' one after another."""
    lo = sum(counts[:rank])
    return lo, lo + counts[rank]
