from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.trainers.algorithms.normalisation import Norm, Reduce, alone, differs_in_group, normalise
from millrace.trainers.errors import BadConfiguration
from tests.trainers.algorithms.played import together

GROUP = Norm("group", "group")
ROWS = st.lists(st.tuples(st.floats(-10, 10), st.sampled_from("abcd"), st.booleans()), min_size=1, max_size=30)
NORMS = st.builds(
    Norm,
    mean_level=st.sampled_from(["batch", "group"]),
    std_level=st.sampled_from([None, "batch", "group"]),
    mean_leave1out=st.booleans(),
    std_unbiased=st.booleans(),
)


def of(values: list[float], groups: str, norm: Norm, mask: list[bool] | None = None) -> list[float]:
    kept = None if mask is None else np.array(mask)
    return normalise(np.array(values, np.float64), list(groups), norm, mask=kept).tolist()


def test_worked_vectors() -> None:
    assert of([1, 0, 0, 0], "gggg", GROUP) == pytest.approx([1.49997, -0.49999, -0.49999, -0.49999], abs=1e-5)
    rloo = Norm("group", None, mean_leave1out=True)
    assert of([1, 0, 0, 0], "gggg", rloo) == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    first = Norm("group", "group", eps=1e-4)
    assert of([1, 0, 0, 0], "gggg", first) == pytest.approx([1.4997, -0.4999, -0.4999, -0.4999], abs=1e-4)


@pytest.mark.parametrize("norm", [GROUP, Norm("group", None), Norm("group", None, mean_leave1out=True)])
def test_a_group_of_one_or_of_equals_comes_out_as_zero(norm: Norm) -> None:
    assert of([3.0], "g", norm) == [0.0]
    assert of([2.0, 2.0, 2.0], "ggg", norm) == [0.0] * 3


def test_groups_of_any_size_and_in_any_order_are_their_own() -> None:
    """A tail that does not fill a slice of fixed size is no special case."""
    whole = of([1, 0, 5, 0, 1, 7, 2], "aabbacc", GROUP)
    for name in "abc":
        rows = [i for i, group in enumerate("aabbacc") if group == name]
        values = [[1, 0, 5, 0, 1, 7, 2][i] for i in rows]
        assert [whole[i] for i in rows] == of(values, name * len(rows), GROUP)
    assert max(abs(x) for x in whole) < 2


def test_what_is_masked_takes_no_part() -> None:
    assert of([1, 99, 0], "ggg", GROUP, [True, False, True])[::2] == of([1, 0], "gg", GROUP)
    assert of([1, 99, 0], "ggg", GROUP, [True, False, True])[1] == 0.0
    assert of([1, 2], "gg", Norm(), [False, False]) == [0, 0]
    assert of([], "", Norm()) == []


@given(ROWS, NORMS)
def test_against_numpy(rows: list[tuple[float, str, bool]], norm: Norm) -> None:
    values, groups, mask = ([row[i] for row in rows] for i in range(3))
    out = of(values, "".join(groups), norm, mask)
    for i, (value, group, kept, _) in enumerate(zip(values, groups, mask, rows, strict=True)):

        def peers(level: str | None, group: str = group) -> Any:
            return np.array([v for v, g, k in rows if k and (level == "batch" or g == group)])

        if not kept:
            assert out[i] == 0.0
            continue
        x = peers(norm.mean_level)
        mean = x.mean()
        if norm.mean_leave1out:
            mean = (x.sum() - value) / (len(x) - 1) if len(x) > 1 else value
        divisor = 1.0
        if norm.std_level is not None:
            y = peers(norm.std_level)
            few = norm.std_unbiased and len(y) < 2
            divisor = (1.0 if few else y.std(ddof=int(norm.std_unbiased))) + norm.eps
        assert out[i] == pytest.approx((value - mean) / divisor, rel=1e-6, abs=1e-7)


@given(ROWS, NORMS, st.randoms())
def test_the_order_is_forgotten(rows: list[tuple[float, str, bool]], norm: Norm, draw: random.Random) -> None:
    order = list(range(len(rows)))
    draw.shuffle(order)
    straight = of([r[0] for r in rows], "".join(r[1] for r in rows), norm, [r[2] for r in rows])
    mixed = [rows[i] for i in order]
    shuffled = of([r[0] for r in mixed], "".join(r[1] for r in mixed), norm, [r[2] for r in mixed])
    assert [straight[i] for i in order] == pytest.approx(shuffled, rel=1e-9, abs=1e-9)


@given(ROWS, NORMS, st.integers(2, 4))
def test_ranks_give_what_one_rank_gives(rows: list[tuple[float, str, bool]], norm: Norm, world: int) -> None:
    """Groups are never split over ranks; a rank may have none."""
    ranks = [[r for r in rows if (ord(r[1]) - ord("a")) % world == rank] for rank in range(world)]
    whole = of([r[0] for r in rows], "".join(r[1] for r in rows), norm, [r[2] for r in rows])
    expected = [x for rank in range(world) for x, r in zip(whole, rows, strict=True) if r in ranks[rank]]
    found = together([partial(share, part, norm) for part in ranks])
    assert [x for rank in found for x in rank] == pytest.approx(expected, rel=1e-9, abs=1e-9)


def share(rows: list[tuple[float, str, bool]], norm: Norm, reduce: Reduce) -> list[float]:
    """One rank's."""
    values, mask = np.array([r[0] for r in rows], np.float64), np.array([r[2] for r in rows], bool)
    return normalise(values, [r[1] for r in rows], norm, mask=mask, reduce=reduce).tolist()


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        ("group/batch", Norm("group", "batch")),
        ("group/none", Norm("group", None)),
        ({"mean_level": "group", "std_level": "none", "mean_leave1out": True}, Norm("group", None, True)),
        ("none", None),
        (None, None),
    ],
)
def test_configurations(given_: Any, expected: Norm | None) -> None:
    assert Norm.parse(given_) == expected


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ("group", "a normalisation is a table"),
        ("grop/batch", "must be batch, group or none"),
        ({"group_size": 4}, "groups carry their own sizes"),
        ({"mean": "group"}, "has no 'mean'"),
        ({"eps": -1.0}, "eps"),
        ({"eps": 0.0}, "divides groups of equals"),
        ({"mean_level": None, "mean_leave1out": True}, "needs a mean_level"),
    ],
)
def test_wrong_configurations_are_refused(given_: Any, message: str) -> None:
    with pytest.raises(BadConfiguration, match=message):
        Norm.parse(given_)


def test_equal_but_for_the_order_of_a_sum_is_equal() -> None:
    values = np.array([0.1 + 0.2, 0.3, 0.0, 1e-9, 5.0, 0.0, 0.0])
    assert differs_in_group(values, list("aabbcdd")).tolist() == [False, False, True, True, False, False, False]
    assert differs_in_group(np.zeros(0), []).tolist() == []


def test_alone() -> None:
    assert alone((1.0, 2.0)) == [1.0, 2.0]
