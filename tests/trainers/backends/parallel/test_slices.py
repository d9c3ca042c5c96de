"""How rows are cut over context ranks."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from millrace.trainers.backends.parallel.slices import pad_row, spans, take
from millrace.trainers.batches.packing import pack
from tests.support.samples import random_samples

SIZES = st.integers(1, 5)


@given(st.integers(0, 50), SIZES, st.integers(1, 4))
def test_slices_hold_each_token_and_label_once(seed: int, size: int, groups: int) -> None:
    batch = pack(random_samples(seed, groups=groups, group_size=2))
    parts = [take(batch, rank, size) for rank in range(size)]
    row = torch.cat([part.batch.tokens for part in parts], 1)
    assert row.shape[1] % size == 0
    assert len({part.batch.tokens.shape for part in parts}) == 1
    assert torch.equal(row[:, : batch.length], batch.tokens)
    assert torch.equal(torch.cat([part.batch.positions for part in parts], 1)[:, : batch.length], batch.positions)
    joined = torch.cat([part.batch.labels for part in parts])
    at = torch.cat([part.batch.at + rank * part.batch.tokens.shape[1] for rank, part in enumerate(parts)])
    for rank, part in enumerate(parts):
        assert torch.equal(joined[part.order], batch.labels)
        assert torch.equal(at[part.order], batch.at)
        lo, hi = spans(part.labels, rank)
        assert torch.equal(joined[lo:hi], part.batch.labels)
        assert part.length == batch.length


@given(st.integers(0, 20), st.integers(1, 9))
def test_fillers_are_samples_of_one_token(seed: int, multiple: int) -> None:
    batch = pack(random_samples(seed, groups=1))
    filled = pad_row(batch, multiple)
    assert filled.tokens.shape[1] % multiple == 0
    assert filled.tokens.shape[1] - batch.length < multiple
    assert sum(run.count * run.length for run in filled.runs) == filled.tokens.shape[1]
    assert filled.labels is batch.labels


def test_an_idle_micro_batch_has_a_token_for_each_rank() -> None:
    for rank in range(3):
        part = take(pack([]), rank, 3)
        assert part.batch.tokens.shape == (1, 1)
        assert part.labels == (0, 0, 0)
