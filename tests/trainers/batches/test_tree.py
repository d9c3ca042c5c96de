"""Samples that share their beginning: packed as a tree they give what they give alone."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.trainers.algorithms.registry import policy
from millrace.trainers.backends.models.build import build
from millrace.trainers.backends.models.forward import token_logprobs
from millrace.trainers.backends.torch.compute import Compute
from millrace.trainers.batches import tree
from millrace.trainers.batches.packing import MicroBatch, cut, pack
from millrace.trainers.batches.sample import Sample
from tests.support.ranks import Ranks
from tests.support.samples import VOCABULARY, random_samples, small_state
from tests.support.steps import train_with
from tests.trainers.spread import pass_alone, pass_together

WORDS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=12)
"""Three tokens only, so that beginnings branch often, end within each other, and come twice."""


def arrays(words: list[list[int]]) -> list[Any]:
    return [np.array(word, np.int32) for word in words]


@given(WORDS)
def test_a_row_has_one_token_for_each_beginning(words: list[list[int]]) -> None:
    found = tree.layout(arrays(words))
    beginnings = {tuple(word[: end + 1]) for word in words for end in range(len(word))}
    assert sum(branch.length for branch in found.branches) == len(beginnings) == tree.size(arrays(words))
    place: dict[tuple[int, ...], int] = {}
    for word, places in zip(words, found.places, strict=True):
        for end, at in enumerate(places.tolist()):
            assert place.setdefault(tuple(word[: end + 1]), at) == at
    assert sorted(place.values()) == list(range(len(beginnings)))
    start = 0
    for branch in found.branches:
        assert branch.start == start
        mine = found.places[branch.sample]
        assert mine[branch.prefix :].tolist() == list(range(start, start + branch.length))
        start += branch.length


@given(WORDS, st.integers(1, 20))
def test_pieces_keep_the_budget(words: list[list[int]], budget: int) -> None:
    made = tree.pieces(arrays(words), budget)
    assert sorted(index for piece in made for index in piece) == list(range(len(words)))
    for piece in made:
        assert len(piece) == 1 or tree.size(arrays([words[index] for index in piece])) <= budget


def family(seed: int, groups: int = 3, size: int = 4, kinds: int = 3) -> list[Sample]:
    """Samples of few different tokens, so that they branch at random; some twice, some one in another."""
    draw = np.random.default_rng(seed)
    samples = []
    for sample in random_samples(seed, groups=groups, group_size=size):
        tokens = (draw.integers(0, kinds, sample.length) + 10 * (sample.seq % 2)).astype(np.int32)
        prompt = draw.integers(1, 6) if draw.random() < 0.5 else 3
        tokens[:prompt] = sample.seq
        samples.append(replace(sample, tokens=tokens))
    return [*samples, replace(samples[0], trajectory="again")]


def outcome(
    batches: list[MicroBatch], kind: str = "qwen2", **more: object
) -> tuple[dict[Sample, Any], dict[str, torch.Tensor]]:
    state = small_state(kind, **more)
    model = build(state.assets, state.weights)
    found: dict[Sample, Any] = {}
    for batch in batches:
        logprobs, entropy = token_logprobs(model, batch, 0.7)
        (logprobs * batch.behaviour).sum().backward()
        found |= batch.split(logprobs.detach() + entropy)
    return found, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 3),
    st.sampled_from(
        [
            ("qwen2", {}),
            ("qwen3", {}),
            ("mistral", {"sliding_window": 4}),
            ("qwen2", {"num_key_value_heads": 4}),
        ]
    ),
)
def test_a_tree_gives_what_its_samples_give_alone(seed: int, kinds: int, model: tuple[str, dict[str, object]]) -> None:
    samples = family(seed, kinds=kinds)
    alone = outcome([pack([sample]) for sample in samples if sample.trainable], model[0], **model[1])
    shared = pack(samples, share=True)
    together = outcome([shared], model[0], **model[1])
    assert shared.length < sum(sample.length for sample in samples)
    for sample, row in alone[0].items():
        np.testing.assert_allclose(together[0][sample], row, rtol=0, atol=5e-6)
    for name, gradient in alone[1].items():
        torch.testing.assert_close(together[1][name], gradient, rtol=0, atol=1e-5 * float(gradient.abs().max()) + 1e-6)


@given(st.integers(0, 10**6), st.randoms())
def test_the_order_samples_come_in_is_forgotten(seed: int, draw: random.Random) -> None:
    samples = family(seed)
    shuffled = list(samples)
    draw.shuffle(shuffled)
    one, other = pack(samples, share=True), pack(shuffled, share=True)
    for name in ("tokens", "positions", "at", "labels", "behaviour", "ends", "owners"):
        assert torch.equal(getattr(one, name), getattr(other, name))
    assert one.runs == other.runs
    assert one.members == other.members


@given(st.integers(0, 10**6), st.integers(1, 120), st.sampled_from(["sequential", "ffd", "kk"]), st.booleans())
def test_micro_batches_of_trees(seed: int, budget: int, packing: str, whole: bool) -> None:
    samples = family(seed)
    micros = cut(samples, budget, packing=packing, share=True, unite=whole)
    assert {id(s) for micro in micros for s in micro} == {id(s) for s in samples if s.trainable}
    assert sum(len(micro) for micro in micros) == len({id(s) for s in samples if s.trainable})
    for micro in micros:
        seqs = {sample.seq for sample in micro}
        assert pack(micro, share=True).length <= budget or len(micro) == 1 or (whole and len(seqs) == 1)


def test_samples_that_share_nothing_are_packed_as_ever() -> None:
    samples = [
        replace(s, tokens=(s.tokens * 0 + i).astype(np.int32)) for i, s in enumerate(random_samples(0, groups=2))
    ]
    plain, shared = pack(samples), pack(samples, share=True)
    assert len(samples) < VOCABULARY
    assert shared.paths is None
    assert shared.length == plain.length
    assert {(run.count, run.length) for run in shared.runs} == {(run.count, run.length) for run in plain.runs}


def test_a_group_of_one_prompt_by_hand() -> None:
    """A prompt of 3, replies of 2, 2 and 1: eight tokens instead of fourteen; the second and third reply attend to the
    first sample's prompt."""
    rows = arrays([[7, 8, 9, 1, 2], [7, 8, 9, 3, 4], [7, 8, 9, 5]])
    found = tree.layout(rows)
    assert [(b.start, b.prefix, b.length, b.sample) for b in found.branches] == [
        (0, 0, 5, 0),
        (5, 3, 1, 2),
        (6, 3, 2, 1),
    ]
    assert [places.tolist() for places in found.places] == [[0, 1, 2, 3, 4], [0, 1, 2, 6, 7], [0, 1, 2, 5]]


@pytest.mark.parametrize("samples", [[], [[1]], [[1], [1]]])
def test_small_trees(samples: list[list[int]]) -> None:
    assert tree.size(arrays(samples)) == min(len(samples), 1)
    assert pack([], share=True).length == 0


@pytest.mark.slow
def test_ranks_train_trees(ranks: Ranks) -> None:
    """Two ranks that agree on a number of micro-batches, some of them emptier, against one that packs plainly."""
    data = [family(seed, groups=5) for seed in range(2)]
    (alone,) = ranks.run(train_with, 1, Compute(), False, small_state(), policy("ppo"), data)
    how = {"prefix_sharing": True, "packing": "kk"}
    for reports, state in ranks.run(train_with, 2, Compute(), True, small_state(), policy("ppo"), data, how):
        for mine, other in zip(reports, alone[0], strict=True):
            assert mine.metrics["loss"] == pytest.approx(other.metrics["loss"], abs=3e-6)
            assert mine.metrics["grad_norm"] == pytest.approx(other.metrics["grad_norm"], rel=1e-5)
            assert 0 < mine.metrics["tree_token_ratio"] < 1
        for name, weight in state.weights.items() if state is not None else ():
            torch.testing.assert_close(weight, alone[1].weights[name], rtol=0, atol=1e-4)


@pytest.mark.slow
def test_ranks_share_the_positions_of_a_tree(ranks: Ranks) -> None:
    state, batch = small_state(), pack(family(3), share=True)
    alone = pass_alone(state, batch)
    for together in ranks.run(pass_together, 2, state, batch):
        for mine, theirs in zip(together[:3], alone[:3], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=3e-6)
        for name, gradient in alone[3].items():
            torch.testing.assert_close(together[3][name], gradient, rtol=1e-4, atol=3e-4, msg=name)
