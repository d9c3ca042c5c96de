"""Which trainable tokens may pull. Denominators keep counting the others (`aggregation.py`).

M2PO keeps the second moment of the log-ratio between the policy that sampled and the one that trains small:

    m2_t = (logp_behav,t - logp_prox,t)^2
    drop the largest m2 until the mean of the rest is below the threshold; if none gets there, the smallest stays

https://arxiv.org/abs/2510.01161.

The mask is taken over the whole batch, over all ranks, so it does not depend on how the batch is cut. Equal values are
dropped or kept together, so it does not depend on any order either.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millrace.trainers.algorithms.normalisation import Reduce, alone
from millrace.trainers.batches.sample import Sample


def fresh(sample: Sample, oldest: int | None) -> NDArray[np.bool_]:
    """bool over the trainable tokens: those of version >= oldest (release policy mask-head: oldest = v - eta); all when
    None."""
    versions = sample.versions[sample.mask != 0]
    return np.ones(len(versions), bool) if oldest is None else versions >= oldest


def second_moment(
    behaviour: NDArray[np.float32],
    proximal: NDArray[np.float32],
    keep: NDArray[np.bool_],
    threshold: float,
    reduce: Reduce = alone,
) -> NDArray[np.bool_]:
    """float32[M], float32[M], bool[M] -> those of `keep` that stay, bool[M]."""
    moments = ((behaviour.astype(np.float64) - proximal.astype(np.float64)) ** 2).astype(np.float32)
    first, smallest = drop_limit(moments[keep], threshold, reduce)
    return np.asarray(keep & ((moments < first) | (moments == first if smallest else False)))


def drop_limit(moments: NDArray[np.float32], threshold: float, reduce: Reduce = alone) -> tuple[np.float32, bool]:
    """The smallest value v with mean(those <= v) >= threshold over all ranks, infinity when there is none; and whether
    it is the smallest of all.

    A radix search: floats that are not negative order as their bits do, and the mean grows with v, so four histograms
    over a byte find it, and no rank sees another's values."""
    bits = np.ascontiguousarray(moments, np.float32).view(np.uint32).astype(np.int64)
    prefix, count, amount = 0, 0.0, 0.0
    above = False
    for shift in (24, 16, 8, 0):
        here = bits >> (shift + 8) == prefix
        byte = bits[here] >> shift & 0xFF
        counts = np.bincount(byte, minlength=256)
        sums = np.bincount(byte, weights=moments[here].astype(np.float64), minlength=256)
        total = np.array(reduce([*counts.tolist(), *sums.tolist()]), np.float64)
        counts_to, sums_to = count + np.cumsum(total[:256]), amount + np.cumsum(total[256:])
        over = np.flatnonzero((total[:256] > 0) & (sums_to >= threshold * counts_to))
        above = above or not len(over)
        bucket = 255 if above else int(over[0])
        count, amount = counts_to[bucket] - total[bucket], sums_to[bucket] - total[256 + bucket]
        prefix = prefix << 8 | bucket
    if above:
        return np.float32(np.inf), False
    return np.uint32(prefix).view(np.float32), count == 0
