"""Every item trains once an epoch, none that is held out ever does, and the order follows from the seed alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.trainers.errors import BadConfiguration
from millrace.trainers.offline.order import ItemOrder


@given(
    count=st.integers(2, 60), batch=st.integers(1, 20), holdout=st.sampled_from([0.0, 0.01, 0.3]), seed=st.integers(0)
)
def test_an_epoch_is_every_item_once(count: int, batch: int, holdout: float, seed: int) -> None:
    order = ItemOrder(count, batch, seed, holdout)
    for epoch in range(2):
        batches = [order.items(epoch * order.steps + place) for place in range(order.steps)]
        assert all(len(one) == batch for one in batches[:-1])
        assert 1 <= len(batches[-1]) <= batch
        seen = [item for one in batches for item in one]
        assert sorted([*seen, *order.held_out]) == list(range(count))
    assert bool(order.held_out) == bool(holdout)
    assert order.items(7) == ItemOrder(count, batch, seed, holdout).items(7)


def test_epochs_and_seeds_differ() -> None:
    one, two = ItemOrder(100, 100, 0), ItemOrder(100, 100, 1)
    assert len({tuple(order) for order in (one.items(0), one.items(1), two.items(0))}) == 3


@pytest.mark.parametrize(("count", "batch", "holdout"), [(1, 1, 0.5), (3, 0, 0.0), (3, 1, 1.0), (0, 1, 0.0)])
def test_what_leaves_nothing_to_train_is_refused(count: int, batch: int, holdout: float) -> None:
    with pytest.raises(BadConfiguration):
        ItemOrder(count, batch, 0, holdout)
