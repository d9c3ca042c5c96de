"""Whoever can write may change a history wherever it says something, and link every chain anew: it is named all the
same, by the law that is meant to name it."""

from __future__ import annotations

import random
from functools import cache

import pytest

from tests.consumers.audit.corruptions.forgeries import ALREADY, MORE, UNSEEN, Forgery
from tests.consumers.audit.corruptions.provenance import PROVENANCE
from tests.support.whole import Whole, whole


@cache
def history(seed: int) -> Whole:
    return whole(seed)


@pytest.mark.parametrize("seed", range(4))
def test_a_whole_history_is_clean(seed: int) -> None:
    report = history(seed).audit()
    assert report.clean, report.violations[:3]
    assert report.finding("folds").checked > 150
    assert not report.finding("folds").notes


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
@pytest.mark.parametrize(
    ("forgery", "law"), [*ALREADY, *UNSEEN, *MORE, *PROVENANCE], ids=lambda value: getattr(value, "__name__", value)
)
def test_each_forgery_is_named_by_its_law(forgery: Forgery, law: str, seed: int) -> None:
    forged = history(seed).copy()
    forgery(forged, random.Random(seed))
    report = forged.audit(quick=law != "folds")  # folding again shows nothing to the other laws
    assert not report.finding(law).holds, [finding.law for finding in report.findings if not finding.holds]


def test_there_are_as_many_as_were_found() -> None:
    assert (len(ALREADY), len(UNSEEN)) == (10, 37)
