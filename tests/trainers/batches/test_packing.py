from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from millrace.trainers.algorithms.sft import Sft
from millrace.trainers.backends.models.build import build
from millrace.trainers.backends.models.forward import token_logprobs
from millrace.trainers.batches.packing import MicroBatch, cut, pack
from millrace.trainers.batches.sample import Sample
from millrace.trainers.errors import BadConfiguration
from tests.support.samples import random_samples, small_state

SHAPES = st.fixed_dictionaries(
    {"seed": st.integers(0, 10**6), "groups": st.integers(1, 4), "group_size": st.integers(1, 4)}
)


def packed(samples: list[Sample]) -> MicroBatch:
    made = pack(samples)
    return made.attach_samples({s: {"column": s.logprobs[s.mask != 0] + s.seq} for s in samples})


def columns(batch: MicroBatch) -> list[list[float]]:
    return [
        *(getattr(batch, name).flatten().tolist() for name in ("tokens", "positions", "at", "labels", "behaviour")),
        *(getattr(batch, name).tolist() for name in ("versions", "owners", "ends", "groups")),
        *(column.tolist() for column in batch.columns.values()),
    ]


@given(SHAPES, st.randoms())
def test_the_order_samples_come_in_is_forgotten(shape: dict[str, int], draw: random.Random) -> None:
    samples = random_samples(**shape)
    shuffled = list(samples)
    draw.shuffle(shuffled)
    assert columns(packed(samples)) == columns(packed(shuffled))


@given(SHAPES, st.integers(1, 200))
def test_micro_batches_hold_every_trainable_token_once(shape: dict[str, int], budget: int) -> None:
    samples = random_samples(**shape)
    micros = cut(samples, budget)
    for micro in micros:
        assert len(micro) == 1 or sum(sample.length for sample in micro) <= budget
    labels = sorted(label for micro in micros for label in pack(micro).labels.tolist())
    assert labels == sorted(int(t) for s in samples for t in s.tokens[s.mask != 0])


@given(SHAPES)
def test_columns_line_up_with_the_tokens_they_describe(shape: dict[str, int]) -> None:
    samples = sorted(random_samples(**shape), key=lambda s: (s.length, s.seq, s.trajectory, s.lineage))
    batch = packed(samples)
    start = row = 0
    for owner, sample in enumerate(samples):
        assert batch.positions[0, start : start + sample.length].tolist() == list(range(sample.length))
        for t in range(sample.length):
            if sample.mask[t]:
                assert batch.at[row] == start + t - 1
                assert batch.labels[row] == sample.tokens[t]
                assert batch.behaviour[row] == sample.logprobs[t]
                assert batch.versions[row] == sample.versions[t]
                assert batch.owners[row] == owner
                assert batch.columns["column"][row] == sample.logprobs[t] + sample.seq
                row += 1
        start += sample.length
        assert batch.ends[owner] == start - 1
        assert batch.members[owner] is sample
    assert (batch.trainable, batch.length, batch.samples) == (row, start, len(samples))
    assert sum(run.count * run.length for run in batch.runs) == start


@given(SHAPES, st.integers(1, 200))
def test_groups_that_belong_together_stay_together(shape: dict[str, int], budget: int) -> None:
    samples = random_samples(**shape)
    micros = cut(samples, budget, unite=True)
    homes = [seq for micro in micros for seq in {sample.seq for sample in micro}]
    assert sorted(homes) == sorted({sample.seq for sample in samples})
    assert {id(s) for micro in micros for s in micro} == {id(s) for s in samples}
    for micro in micros:
        batch = pack(micro)
        same = [[a.seq == b.seq for a in batch.members] for b in batch.members]
        assert (batch.groups[:, None] == batch.groups[None]).tolist() == same


@given(SHAPES)
def test_what_is_split_is_what_was_attached(shape: dict[str, int]) -> None:
    samples = random_samples(**shape)
    batch = pack(samples)
    for sample, row in batch.split(batch.behaviour).items():
        assert row.tolist() == sample.logprobs[sample.mask != 0].tolist()
    assert pack([]).split(pack([]).behaviour) == {}


def test_a_column_that_nobody_attached_is_refused() -> None:
    with pytest.raises(BadConfiguration, match="advantages is not attached"):
        pack(random_samples(0)).advantages  # noqa: B018
    assert pack([]).keep.numel() == 0


@pytest.mark.parametrize(
    ("kind", "settings_"),
    [
        ("qwen2", {}),
        ("qwen3", {}),
        ("llama", {}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
        ("mistral", {"sliding_window": 4}),
    ],
)
def test_packed_equals_unpacked(kind: str, settings_: dict[str, object]) -> None:
    """Against transformers' own sdpa, one sample at a time."""
    state = small_state(kind, **settings_)
    samples = random_samples(3)
    batch = packed(samples)
    with torch.no_grad():
        ours, entropy = token_logprobs(build(state.assets, state.weights), batch, temperature=0.7)
        plain = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(kind, **_settings(state.assets)), dtype=torch.float32, attn_implementation="sdpa"
        )
        plain.load_state_dict(dict(state.weights))
        theirs, entropies = [], []
        for sample in sorted(samples, key=lambda s: (s.length, s.seq, s.trajectory, s.lineage)):
            ids = torch.from_numpy(sample.tokens.astype("int64"))[None]
            distribution = torch.log_softmax(plain(ids).logits[0] / 0.7, -1)
            for t in sample.mask.nonzero()[0]:
                theirs.append(distribution[t - 1, ids[0, t]])
                entropies.append(torch.distributions.Categorical(logits=distribution[t - 1]).entropy())
    torch.testing.assert_close(ours, torch.stack(theirs), rtol=0, atol=3e-6)
    torch.testing.assert_close(entropy, torch.stack(entropies), rtol=0, atol=3e-6)


def _settings(assets: object) -> dict[str, object]:
    import json

    content = json.loads(assets["config.json"])  # type: ignore[index]
    content.pop("model_type")
    return content


@settings(max_examples=10, deadline=None)
@given(SHAPES)
def test_no_sample_sees_another(shape: dict[str, int]) -> None:
    state = small_state()
    model = build(state.assets, state.weights)
    samples = random_samples(**shape)
    with torch.no_grad():
        together = token_logprobs(model, packed(samples), 1.0)[0]
        ordered = sorted(samples, key=lambda s: (s.length, s.seq, s.trajectory, s.lineage))
        alone = torch.cat([token_logprobs(model, packed([sample]), 1.0)[0] for sample in ordered])
    torch.testing.assert_close(together, alone, rtol=0, atol=2e-6)


def test_an_empty_micro_batch_has_a_gradient_of_zero() -> None:
    state = small_state()
    model = build(state.assets, state.weights)
    logprobs, entropy = token_logprobs(model, pack([]), 1.0)
    loss, sums = Sft().loss(logprobs, entropy, pack([]))
    loss.backward()
    assert loss.item() == 0.0
    assert float(sums["kept"]) == 0.0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    assert (pack([]).length, pack([]).samples) == (0, 0)
