"""Stages on several processes: as one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from millrace.trainers.backends.parallel.schedules import SCHEDULES
from millrace.trainers.batches.packing import pack
from tests.support.ranks import Ranks
from tests.support.samples import random_samples, small_state
from tests.trainers.spread import micros_alone, micros_piped

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as pool:
        yield pool


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("world", "kind"), [(2, "qwen2"), (4, "qwen3")])
def test_a_pipeline_is_the_model_of_one_process(ranks: Ranks, world: int, kind: str, schedule: str) -> None:
    """Micro-batches of unequal lengths and an idle one: log-probabilities to the last bit, and every gradient too."""
    state = small_state(kind, num_hidden_layers=9)
    batches = [pack(random_samples(seed, groups=1 + seed % 3)) for seed in range(7)]
    batches.append(pack([]))
    losses, logprobs, gradients = micros_alone(state, batches)
    outcomes = ranks.run(micros_piped, world, state, batches, schedule)
    found: dict[str, torch.Tensor] = {}
    for told_losses, told, own in outcomes:
        for mine, theirs in zip(told, logprobs, strict=True):
            assert torch.equal(mine, theirs)
        assert not found.keys() & own.keys()
        found |= own
        assert told_losses in ([], losses)
    assert outcomes[-1][0] == losses
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert torch.equal(found[name], gradient), name
