from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.trainers.algorithms.masks import drop_limit, fresh, second_moment
from tests.support.samples import random_samples
from tests.trainers.algorithms.played import together

MOMENTS = st.lists(st.floats(0, 4, width=32).map(lambda x: round(x, 2)), min_size=1, max_size=40)


def test_fresh_tokens() -> None:
    for sample in random_samples(0, version=5):
        versions = sample.versions[sample.mask != 0]
        assert fresh(sample, None).all()
        assert fresh(sample, 4).tolist() == (versions >= 4).tolist()


def test_the_worked_vector_of_m2po() -> None:
    behaviour = np.array([0.1, 0.3, -0.5, 0.0], np.float32)
    keep = second_moment(behaviour, np.zeros(4, np.float32), np.ones(4, bool), 0.04)
    assert keep.tolist() == [True, True, False, True]


def test_the_smallest_stays_where_nothing_is_small_enough() -> None:
    behaviour = np.array([1.0, 2.0, 3.0], np.float32)
    assert second_moment(behaviour, np.zeros(3, np.float32), np.ones(3, bool), 0.04).tolist() == [True, False, False]
    nobody = second_moment(behaviour, np.zeros(3, np.float32), np.zeros(3, bool), 0.04)
    assert not nobody.any()


@given(MOMENTS, st.floats(0.01, 3))
def test_against_the_sorted_suffixes(moments: list[float], threshold: float) -> None:
    values = np.array(moments, np.float32)
    first, smallest = drop_limit(values, threshold)
    kept = values[(values < first) | ((values == first) & smallest)].astype(np.float64)
    down = np.sort(values.astype(np.float64))[::-1]
    suffixes = [i for i in range(len(down)) if down[i:].mean() < threshold - 1e-9]
    if not suffixes:
        assert smallest or kept.mean() == pytest.approx(threshold, abs=1e-6)
        assert set(kept.tolist()) == {float(values.min())} or kept.mean() == pytest.approx(threshold, abs=1e-6)
        return
    expected = down[suffixes[0] :]
    # Equal values go together: of those that the boundary would split, none stays unless they are the smallest.
    assert len(kept) <= len(expected) + 1e-9 or kept.mean() == pytest.approx(threshold, abs=1e-6)
    assert (kept.mean() < threshold) or smallest
    more = values[values >= first]
    if len(more) and not smallest:
        assert values[values <= more.min()].astype(np.float64).mean() >= threshold - 1e-6


@given(MOMENTS, st.floats(0.01, 3), st.integers(2, 4))
def test_ranks_find_what_one_rank_finds(moments: list[float], threshold: float, world: int) -> None:
    values = np.array(moments, np.float32)
    parts = [values[rank::world] for rank in range(world)]
    found = together([partial(drop_limit, part, threshold) for part in parts])
    assert set(found) == {drop_limit(values, threshold)}
