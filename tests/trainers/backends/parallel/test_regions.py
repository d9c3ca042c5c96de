"""Boxes of parameters: together they are the whole, once."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from millrace.trainers.backends.layout import Layout
from millrace.trainers.backends.parallel.grid import AXES, CP, DP, EDP, EP, FS, PP, TP, Grid
from millrace.trainers.backends.parallel.regions import ShardedParameter, take

SMALL = st.integers(1, 3)


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    d, t, p, c = (draw(SMALL) for _ in range(4))
    e = draw(st.sampled_from([1, *(c * t * k for k in range(1, d + 1) if d % k == 0)]))
    return Grid(Layout(d=d, t=t, p=p, c=c, e=e))


@given(grids())
def test_axes_number_the_ranks(grid: Grid) -> None:
    for axes in ((PP, DP, CP, TP), (PP, FS, TP), (PP, EP, EDP)):
        seen = {tuple(grid.index(axis, rank) for axis in axes) for rank in range(grid.world)}
        assert len(seen) == grid.world
    for axis in AXES:
        along = [grid.peers(axis, rank) for rank in range(grid.world)]
        for rank, peers in enumerate(along):
            assert len(peers) == grid.size(axis)
            assert [grid.index(axis, peer) for peer in peers] == list(range(grid.size(axis)))
            assert peers[grid.index(axis, rank)] == rank
            assert all(along[peer] == peers for peer in peers)
    leaders = [rank for rank in range(grid.world) if grid.leads(rank)]
    assert sorted(grid.index(DP, rank) for rank in leaders) == list(range(grid.layout.d))


@given(
    grids(),
    st.lists(st.integers(1, 13), min_size=2, max_size=3),
    st.sampled_from([((FS, 0),), ((TP, 0), (FS, 0)), ((TP, 1), (FS, 0)), ((EP, 0), (EDP, 0))]),
    st.booleans(),
)
def test_owners_hold_every_element_once(
    grid: Grid, shape: list[int], cuts: tuple[tuple[str, int], ...], staged: bool
) -> None:
    held = ShardedParameter("weight", tuple(shape), cuts, grid.layout.p - 1 if staged else None)
    seen = torch.zeros(shape, dtype=torch.int64)
    for rank in range(grid.world):
        box = held.box(grid, rank)
        assert take(seen, box).numel() == held.numel(grid, rank)
        if held.owned_by(grid, rank):
            assert held.on(grid, rank)
            take(seen, box).add_(1)
    assert torch.equal(seen, torch.ones_like(seen))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(1, 7))
def test_data_parallel_boxes_are_the_chunks_of_torch(shape: list[int], world: int) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    chunks = torch.chunk(tensor, world)
    grid, held = Grid(Layout(d=world)), ShardedParameter("weight", tuple(shape))
    for rank in range(world):
        mine = take(tensor, held.box(grid, rank))
        assert mine.numel() == held.numel(grid, rank)
        assert torch.equal(mine, chunks[rank] if rank < len(chunks) else tensor[:0])
