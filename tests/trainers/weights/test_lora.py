"""LoRA: only the adapter learns, what is published is what trained, and a run that is read back goes on unchanged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch.distributed.distributed_c10d import Store
from transformers import AutoModelForCausalLM, PreTrainedModel

from millrace.trainers.algorithms.registry import policy
from millrace.trainers.backends.base import Adam
from millrace.trainers.backends.layout import Layout
from millrace.trainers.backends.models.build import build
from millrace.trainers.backends.parallel.grid import Grid, Groups
from millrace.trainers.backends.torch.backend import TorchBackend
from millrace.trainers.backends.torch.chunk import Home
from millrace.trainers.backends.torch.compute import Compute
from millrace.trainers.backends.torch.trainee import Trainee
from millrace.trainers.batches.packing import pack
from millrace.trainers.errors import BadConfiguration, CheckpointError, CorruptCheckpoint
from millrace.trainers.learning import Schedule, Trainer
from millrace.trainers.phase_clock import Clock
from millrace.trainers.weights import checkpoint, lora
from millrace.trainers.weights.adapter import A, B, Lora
from millrace.trainers.weights.state import State
from tests.support.architectures import tiny_state
from tests.support.ranks import Ranks
from tests.support.samples import random_samples, small_state
from tests.support.steps import train_share

LORA = Lora(rank=4, alpha=8)


@pytest.fixture
def base(tmp_path: Path) -> State:
    """Version 0, read back: qwen2 in fp32."""
    return checkpoint.read(checkpoint.write(tmp_path / "weights", 0, small_state()).path)


def run(
    backend: TorchBackend,
    rank: int,
    world: int,
    store: Store | None,
    state: State,
    kind: Lora | None,
    batches: tuple[int, ...],
    algorithm: str = "grpo",
) -> State | None:
    """Trains the batches of these seeds; the state, on rank 0."""
    backend.form(rank, world, store, 30.0)
    trainer = Trainer(backend, policy(algorithm, minibatches=1), Schedule(1e-2), lora=kind)
    trainer.load(state)
    for seed in batches:
        train_share(trainer, random_samples(seed), rank, world, 0)
    gathered = backend.gather()
    backend.tear_down()
    return gathered


def alone(state: State, kind: Lora | None = LORA, batches: tuple[int, ...] = (0,), algorithm: str = "grpo") -> State:
    done = run(TorchBackend(device="cpu"), 0, 1, None, state, kind, batches, algorithm)
    assert done is not None
    return done


def adapter_of(state: State) -> dict[str, torch.Tensor]:
    assert state.adapter is not None
    return dict(state.adapter.weights)


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=torch.arange(3, 43)[None]).logits
    return found


def plain_model(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model


def test_a_fresh_adapter_changes_nothing_and_is_the_same_everywhere(base: State) -> None:
    begun = lora.prepare(base, LORA)
    again = lora.prepare(replace(base, weights=dict(reversed(base.weights.items()))), LORA)
    fresh = adapter_of(begun)
    assert len(fresh) == 2 * 7 * 2, "A and B of seven targets in two layers"
    assert all(torch.equal(fresh[name], tensor) for name, tensor in adapter_of(again).items())
    assert len({tensor.sum().item() for name, tensor in fresh.items() if name.endswith(A)}) == 14, "none like another"
    for name, weight in lora.merge(begun).weights.items():
        assert torch.equal(weight, base.weights[name])


def test_only_the_adapter_learns(base: State) -> None:
    done = alone(base)
    begun = lora.prepare(base, LORA)
    assert all(torch.equal(weight, base.weights[name]) for name, weight in done.weights.items())
    assert done.step == 1
    assert done.moments["exp_avg"].keys() == adapter_of(done).keys() == adapter_of(begun).keys()
    moved = {name for name, tensor in adapter_of(done).items() if not torch.equal(tensor, adapter_of(begun)[name])}
    assert moved == {name for name in adapter_of(begun) if name.endswith(B)}, "A has no gradient while B is zero"
    twice = alone(base, batches=(0, 1))
    assert all(not torch.equal(tensor, adapter_of(begun)[name]) for name, tensor in adapter_of(twice).items())


def test_gradients_are_those_of_finite_differences(base: State) -> None:
    begun = lora.prepare(base, LORA)
    assert begun.adapter is not None
    torch.manual_seed(1)
    values = {name: tensor + 0.2 * torch.randn_like(tensor) for name, tensor in begun.adapter.weights.items()}
    batch = pack(random_samples(3)[:6])

    def loss(model: torch.nn.Module) -> torch.Tensor:
        out = model(
            input_ids=batch.tokens,
            position_ids=batch.positions,
            attention_mask=batch.tokens.new_zeros((1, 1, 1, 1)),
            use_cache=False,
            runs=batch.runs,
        ).logits[0, batch.at]
        return -out.double().log_softmax(-1).gather(-1, batch.labels[:, None]).sum()

    model = build(begun.assets, begun.weights)
    lora.attach(model, replace(begun.adapter, weights=values))
    model.double()
    loss(model).backward()
    frozen = [p for name, p in model.named_parameters() if "lora_" not in name]
    assert frozen
    assert all(p.grad is None and not p.requires_grad for p in frozen)
    checked = 0
    for name, parameter in model.named_parameters():
        if "lora_" not in name or "layers.1" not in name:
            continue
        assert parameter.grad is not None
        slope = float(parameter.grad.norm())
        way, before, step = parameter.grad / slope, parameter.data.clone(), 5e-3
        parameter.data = before + step * way
        up = loss(model).item()
        parameter.data = before - step * way
        down = loss(model).item()
        parameter.data = before
        assert (up - down) / (2 * step) == pytest.approx(slope, rel=5e-3), name
        checked += 1
    assert checked == 14


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merged_and_adapter_are_the_same_model(tmp_path: Path, dtype: str) -> None:
    root = tmp_path / "weights"
    base = checkpoint.read(checkpoint.write(root, 0, small_state("qwen3", dtype=dtype)).path)
    done = alone(base, batches=(0, 1, 2))
    full = checkpoint.write(root, 1, done)
    bare = checkpoint.write(root, 2, alone(base, replace(LORA, publish="adapter"), (0, 1, 2)))
    assert base.source is not None
    assert "adapter_model.safetensors" in bare.files
    assert not {"model.safetensors"} & bare.files.keys()
    assert not [name for name in full.files if name.startswith("adapter")]
    together = PeftModel.from_pretrained(plain_model(base.source), bare.path).eval()
    tolerance = 1e-5 if dtype == "float32" else 0.05  # merged weights are rounded to bf16
    torch.testing.assert_close(logits(plain_model(full.path)), logits(together), rtol=0, atol=tolerance)
    assert (logits(together) - logits(plain_model(base.source))).abs().max() > 20 * tolerance / (
        1 + 19 * (tolerance > 1e-3)
    )
    merged = together.merge_and_unload()
    for name, weight in lora.merge(done).weights.items():
        torch.testing.assert_close(dict(merged.named_parameters())[name], weight, rtol=0, atol=1e-6)


@pytest.mark.parametrize("publish", ["merge", "adapter"])
def test_what_is_read_goes_on_as_if_never_stopped(base: State, tmp_path: Path, publish: Any) -> None:
    kind = replace(LORA, publish=publish)
    through = alone(base, kind, (0, 1))
    half = alone(base, kind, (0,))
    written = checkpoint.write(tmp_path / "weights", 1, half)
    back = checkpoint.read(written.path, digest=written.digest)
    assert checkpoint.fingerprint(back) == checkpoint.fingerprint(half)
    on = alone(back, kind, (1,))
    assert checkpoint.fingerprint(on) == checkpoint.fingerprint(through)
    assert on.step == through.step == 2
    assert on.moments.keys() == {"exp_avg", "exp_avg_sq"}
    sizes = {name: (written.path / name).stat().st_size for name in written.files}
    assert sizes["state.tensors"] < sum(t.numel() for t in base.weights.values()) * 4, "moments are the adapter's"


@pytest.mark.slow
def test_layouts_agree(ranks: Ranks, base: State, tmp_path: Path) -> None:
    one, two = (ranks.run(run, world, base, LORA, (0, 1))[0] for world in (1, 2))
    for name, tensor in adapter_of(one).items():
        torch.testing.assert_close(adapter_of(two)[name], tensor, rtol=0, atol=5e-5)
    # begun by two ranks, saved, gone on with by one, and the other way round
    back = checkpoint.read(checkpoint.write(tmp_path / "weights", 1, two).path)
    mixed = ranks.run(run, 1, back, LORA, (2,))[0]
    other = ranks.run(run, 2, one, LORA, (2,))[0]
    for name, tensor in adapter_of(mixed).items():
        torch.testing.assert_close(adapter_of(other)[name], tensor, rtol=0, atol=1e-4)


def test_a_policy_changes_over_in_both_directions(base: State, tmp_path: Path) -> None:
    adapted = alone(base, batches=(0, 1))
    full = alone(adapted, None, ())
    assert full.adapter is None
    assert (full.step, dict(full.moments)) == (0, {})
    for name, weight in lora.merge(adapted).weights.items():
        assert torch.equal(full.weights[name], weight)
    again = checkpoint.read(checkpoint.write(tmp_path / "weights", 5, full).path)
    anew = lora.prepare(again, LORA)
    assert anew.adapter is not None
    assert anew.adapter.base.name.startswith("v5-")


def test_a_critic_begins_from_the_merged_policy(base: State) -> None:
    adapted = alone(base, batches=(0, 1))
    with_critic = alone(adapted, LORA, (2,), "ppo")
    assert with_critic.critic is not None
    assert with_critic.critic.adapter is None
    began = lora.merge(adapted).weights
    changes = [
        (weight - began[name]).abs().max()
        for name, weight in with_critic.critic.weights.items()
        if name in began and "q_proj.weight" in name
    ]
    assert changes
    assert max(changes) < 0.03, "a step or two away from the merged policy, not from its base"


def test_what_does_not_fit_is_refused(base: State, tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match=r"no layer c_attn to adapt; it has down_proj"):
        lora.prepare(base, Lora(targets=("c_attn",)))
    with pytest.raises(BadConfiguration, match="rank of at least 1"):
        Lora(rank=0)
    with pytest.raises(BadConfiguration, match="a base on disk"):
        lora.prepare(small_state(), LORA)
    done = alone(base)
    with pytest.raises(BadConfiguration, match="adapter of rank 4, alpha 8"):
        lora.prepare(done, Lora(rank=8, alpha=8))
    bare = checkpoint.write(tmp_path / "weights", 1, alone(base, replace(LORA, publish="adapter")))
    with pytest.raises(CheckpointError, match="is an adapter: merge it"):
        checkpoint.adopt(bare.path)
    assert base.source is not None
    about = json.loads((base.source / "config.json").read_bytes())
    (base.source / "config.json").write_text(json.dumps(about | {"rms_norm_eps": 1e-3}))
    with pytest.raises(CorruptCheckpoint, match="is not the base"):
        checkpoint.read(bare.path)


def test_weight_decay_shrinks_the_adapter_alone(base: State) -> None:
    backend = TorchBackend(Adam(weight_decay=0.5), device="cpu")
    done = run(backend, 0, 1, None, base, LORA, (0,))
    assert done is not None
    assert all(torch.equal(weight, base.weights[name]) for name, weight in done.weights.items())
    begun = adapter_of(lora.prepare(base, LORA))
    names = [name for name in begun if name.endswith(A)]
    for name in names:
        torch.testing.assert_close(adapter_of(done)[name], begun[name] * (1 - 1e-2 * 0.5))


def test_only_what_can_train_an_adapter_gets_one(base: State) -> None:
    class Other(TorchBackend):
        adapters = False

    with pytest.raises(BadConfiguration, match="Other trains no adapters"):
        Trainer(Other(device="cpu"), policy("grpo"), Schedule(), lora=LORA)
    place = Home(torch.device("cpu"), Groups(Grid(Layout(t=2)), 1), Clock(), False, Compute())
    with pytest.raises(BadConfiguration, match="torch:d1t2: an adapter trains with data parallelism alone, d2"):
        Trainee(lora.prepare(base, LORA), place, Adam())


def test_an_adapter_learns_in_bf16_and_with_layers_computed_twice(base: State) -> None:
    exact, begun = adapter_of(alone(base, batches=(0, 1))), adapter_of(lora.prepare(base, LORA))

    def change(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat([(weights[name] - begun[name]).flatten() for name in begun])

    for compute, likeness in ((Compute(checkpointing=True), 0.9999), (Compute(bf16=True), 0.9)):
        done = run(TorchBackend(device="cpu", compute=compute), 0, 1, None, base, LORA, (0, 1))
        assert done is not None
        assert all(tensor.dtype == torch.float32 for tensor in adapter_of(done).values())
        assert torch.cosine_similarity(change(adapter_of(done)), change(exact), dim=0) > likeness


@pytest.mark.parametrize(
    ("kind", "target", "reason"),
    [
        ("zamba", "q_proj", "has model.layers.2.shared_transf.self_attn.q_proj in several places"),
        ("mamba", "dt_proj", "kernels that read its weight past an adapter"),
        ("gpt2", "c_attn", "is a Conv1D, which takes no adapter"),
    ],
)
def test_a_layer_that_an_adapter_would_miss_gets_none(kind: str, target: str, reason: str, tmp_path: Path) -> None:
    state = lora.prepare(tiny_state(kind, tmp_path), Lora(targets=(target,)))
    assert state.adapter is not None
    with pytest.raises(BadConfiguration, match=reason):
        lora.attach(build(state.assets, state.tensors), state.adapter)
