"""A micro-batch as a few tensors, for a rank that has none of its samples.

What is sent are the samples and the columns; the other side packs again. Packing is a function of the samples alone, so
both hold the same row. Names and rewards stay behind: nobody who computes on a micro-batch looks at them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from millrace.trainers.batches.packing import (
    ADVANTAGES,
    KEEP,
    PROXIMAL,
    REFERENCE,
    RETURNS,
    SIDE,
    TEACHER,
    VALUES,
    MicroBatch,
    pack,
)
from millrace.trainers.batches.sample import Sample

COLUMNS = (ADVANTAGES, KEEP, PROXIMAL, REFERENCE, TEACHER, VALUES, RETURNS, SIDE)
TENSORS = 7
"""of a micro-batch"""


def encode(micro: MicroBatch) -> list[torch.Tensor]:
    """v_prox, v_theta, whether beginnings are shared, and which columns there are, float64[3 + C]; lengths and seqs,
    int64[2, S]; tokens and versions, int32[T]; masks, uint8[T]; log-probabilities, float32[T]; columns, float32[c,
    M]."""
    members = micro.members
    has = [name for name in COLUMNS if name in micro.columns]
    about = [micro.v_prox, micro.v_theta, micro.shared, *(name in has for name in COLUMNS)]
    columns = [micro.columns[name] for name in has]
    return [
        torch.tensor(about, dtype=torch.float64),
        torch.tensor([[s.length for s in members], [s.seq for s in members]], dtype=torch.int64),
        torch.from_numpy(np.concatenate([np.zeros(0, np.int32), *(s.tokens for s in members)])),
        torch.from_numpy(np.concatenate([np.zeros(0, np.int32), *(s.versions for s in members)])),
        torch.from_numpy(np.concatenate([np.zeros(0, np.uint8), *(s.mask for s in members)])),
        torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *(s.logprobs for s in members)])),
        torch.stack(columns) if columns else torch.zeros(0, micro.trainable),
    ]


def decode(tensors: Sequence[torch.Tensor]) -> MicroBatch:
    """What `encode` was given, its samples without names and rewards."""
    about, shape, *rows, columns = tensors
    v_prox, v_theta, shares, *has = about.tolist()
    lengths, seqs = shape.tolist()
    bounds = np.cumsum(lengths)[:-1]
    parts = [np.split(row.numpy(), bounds) if lengths else [] for row in rows]
    samples = [
        Sample(tokens, mask, logprobs, versions, None, seq, str(seq), f"{index:09d}")
        for index, (tokens, versions, mask, logprobs, seq) in enumerate(zip(*parts, seqs, strict=True))
    ]
    micro = replace(pack(samples, share=bool(shares)), v_prox=v_prox, v_theta=v_theta)
    return micro.attach(**dict(zip([n for n, there in zip(COLUMNS, has, strict=True) if there], columns, strict=True)))
