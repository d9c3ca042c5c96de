from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from trainers.backends.sharding import numel, part

SHAPE = st.lists(st.integers(1, 9), min_size=1, max_size=3)


@given(SHAPE, st.integers(1, 7))
def test_parts_are_the_chunks_of_torch(shape: list[int], world: int) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    chunks = torch.chunk(tensor, world)
    for rank in range(world):
        mine = part(tensor, world, rank)
        assert mine.numel() == numel(shape, world, rank)
        assert torch.equal(mine, chunks[rank] if rank < len(chunks) else tensor[:0])
