from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.trainers.batches.bins import ALLOCATORS as PACKED
from millrace.trainers.batches.bins import differencing, divide, ffd, kk, sequential
from millrace.trainers.errors import BadConfiguration

SIZES = st.lists(st.integers(1, 120), max_size=30)
PACKINGS = st.sampled_from(sorted(PACKED))


@given(SIZES, st.integers(1, 200), PACKINGS, st.integers(1, 6), st.integers(1, 4))
def test_every_unit_once_and_no_bin_too_full(
    sizes: list[int], capacity: int, packing: str, least: int, divisor: int
) -> None:
    bins = divide(sizes, capacity, packing=packing, least=least, divisor=divisor)
    assert sorted(index for members in bins for index in members) == list(range(len(sizes)))
    for members in bins:
        assert members == sorted(members)
        assert len(members) == 1 or sum(sizes[index] for index in members) <= capacity
    assert bins == sorted(bins)
    assert len(bins) >= min(least, len(sizes))
    assert len(bins) % divisor == 0 or len(bins) == len(sizes)
    assert bins == divide(sizes, capacity, packing=packing, least=least, divisor=divisor)


@given(SIZES.filter(len), st.integers(1, 8))
def test_differencing_is_as_even_as_any_unit_allows(sizes: list[int], number: int) -> None:
    bins = differencing(sizes, min(number, len(sizes)))
    loads = [sum(sizes[index] for index in members) for members in bins]
    assert len(bins) == min(number, len(sizes))
    assert max(loads) <= sum(sizes) / len(bins) + max(sizes)


def test_next_fit_by_hand() -> None:
    assert sequential([3, 4, 2, 6, 1], 7, 1) == [[0, 1], [2], [3, 4]]


def test_first_fit_decreasing_by_hand() -> None:
    """7 and 6 open bins; 3 has room in both, of one unit each, and 6 is the lighter; 2 has room beside 7 alone; then
    both bins hold two units and 9, and 1 goes to the first."""
    assert ffd([7, 6, 3, 2, 1], 10, 1) == [[0, 3, 4], [1, 2]]
    assert ffd([5, 5], 10, 2) == [[0], [1]], "two bins were asked for"
    assert ffd([5, 5], 10, 1) == [[0, 1]]


def test_largest_differencing_by_hand() -> None:
    """8-7 = 1 and 6-5 = 1 are set against each other; 4-1 = 3, then 3-1 = 2: 16 against 14, though 15 and 15 exist."""
    bins = differencing([8, 7, 6, 5, 4], 2)
    assert sorted(sum([8, 7, 6, 5, 4][i] for i in members) for members in bins) == [14, 16]


def test_differencing_needs_fewer_bins_and_more_even_ones_than_next_fit() -> None:
    sizes = [90, 20, 70, 40, 30, 60, 50, 80]
    loads = {name: [sum(sizes[i] for i in members) for members in pack(sizes, 120, 1)] for name, pack in PACKED.items()}
    assert loads["sequential"] == [110, 110, 90, 50, 80]
    assert loads["kk"] == [110] * 4


def test_it_falls_back_where_an_even_partition_is_over_the_capacity() -> None:
    sizes = [6, 6, 6]  # 18 of 9 a bin would be two, but no two fit together
    assert kk(sizes, 9, 1) == [[0], [1], [2]]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(2, 3))
def test_differencing_against_every_partition(sizes: list[int], number: int) -> None:
    """Its largest bin is at most 4/3 - 1/(3k) of the best one's."""
    number = min(number, len(sizes))
    best = min(
        max(sum(size for size, at in zip(sizes, places, strict=True) if at == b) for b in range(number))
        for places in itertools.product(range(number), repeat=len(sizes))
    )
    ours = max(sum(sizes[index] for index in members) for members in differencing(sizes, number))
    assert ours <= best * (4 / 3 - 1 / (3 * number)) + 1e-9


def test_units_beyond_the_capacity_lie_alone() -> None:
    for packing in PACKED:
        assert [1] in divide([5, 50, 5], 10, packing=packing)


def test_impossible_requests_are_refused() -> None:
    with pytest.raises(BadConfiguration, match="choose one of sequential, ffd, kk"):
        divide([1], 1, packing="best")
    with pytest.raises(BadConfiguration, match="above 0"):
        divide([1], 0, packing="kk")
    assert divide([], 5, packing="kk") == []
