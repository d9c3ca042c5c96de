"""Positions of one row over several processes: as one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from millrace.trainers.backends.models.build import build
from millrace.trainers.backends.parallel.context import spread
from millrace.trainers.batches.packing import pack
from millrace.trainers.errors import BadConfiguration
from tests.support.ranks import Ranks
from tests.support.samples import random_samples, small_state
from tests.trainers.spread import pass_alone, pass_together


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as pool:
        yield pool


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_a_row_over_ranks_is_the_row_of_one_process(ranks: Ranks, world: int, kind: str) -> None:
    """At c4 there are fewer key heads (2) than ranks."""
    state, batch = small_state(kind), pack(random_samples(3, groups=2))
    alone = pass_alone(state, batch)
    for together in ranks.run(pass_together, world, state, batch):
        for mine, theirs in zip(together[:3], alone[:3], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-6)
        assert together[3].keys() == alone[3].keys()
        for name, gradient in alone[3].items():
            torch.testing.assert_close(together[3][name], gradient, rtol=1e-4, atol=2e-4, msg=name)


@pytest.mark.slow
def test_windows_slide_over_slices(ranks: Ranks) -> None:
    window = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}
    state, batch = small_state(**window), pack(random_samples(4, groups=1))
    assert "sliding_attention" in build(state.assets, state.weights).config.layer_types
    alone = pass_alone(state, batch)
    for together in ranks.run(pass_together, 2, state, batch):
        torch.testing.assert_close(together[0], alone[0], rtol=0, atol=2e-6)


@pytest.mark.slow
def test_samples_share_beginnings_over_slices(ranks: Ranks) -> None:
    samples = [
        replace(sample, tokens=np.concatenate([np.arange(3, dtype=np.int32), sample.tokens[3:]]))
        for sample in random_samples(5, groups=2)
    ]
    state, batch = small_state(), pack(samples, share=True)
    assert batch.paths is not None
    alone = pass_alone(state, batch)
    for together in ranks.run(pass_together, 2, state, batch):
        torch.testing.assert_close(together[0], alone[0], rtol=0, atol=2e-6)
        for name, gradient in alone[3].items():
            torch.testing.assert_close(together[3][name], gradient, rtol=1e-4, atol=2e-4, msg=name)


@pytest.mark.slow
def test_an_idle_micro_batch_keeps_ranks_aligned(ranks: Ranks) -> None:
    for logprobs, *_ in ranks.run(pass_together, 2, small_state(), pack([])):
        assert logprobs.shape == (0,)


def test_heads_must_divide() -> None:
    model = build(small_state().assets, small_state().weights)
    spread(model, 4)
    spread(model, 2, 2)
    with pytest.raises(BadConfiguration, match="4 attention heads do not divide over c3"):
        spread(model, 3)
    with pytest.raises(BadConfiguration, match="2 attention heads a tensor rank"):
        spread(model, 4, 2)
