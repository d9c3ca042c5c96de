"""Roles that leave the device between their uses: the same bytes, and memory that falls."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import Store

from millrace.trainers.algorithms.base import Algorithm
from millrace.trainers.algorithms.distill import Distill
from millrace.trainers.algorithms.registry import policy
from millrace.trainers.backends.factory import make_backend
from millrace.trainers.backends.layout import ACTOR, CRITIC, REFERENCE, ROLES
from millrace.trainers.backends.torch.backend import TorchBackend
from millrace.trainers.backends.torch.compute import Compute
from millrace.trainers.backends.torch.offload import TensorShelf
from millrace.trainers.batches.packing import pack
from millrace.trainers.errors import BadConfiguration
from millrace.trainers.learning import Schedule, Trainer
from millrace.trainers.weights import checkpoint
from millrace.trainers.weights.adapter import Lora
from millrace.trainers.weights.state import State
from tests.support.ranks import Ranks
from tests.support.samples import random_samples, small_state
from tests.support.steps import HELD, train, train_share

EVERY_ROLE = (policy("ppo", kl_coef=0.1), Distill(), policy("distill-on-policy"))


def run(
    _: Any, rank: int, world: int, store: Store, state: State, algorithm: Algorithm, options: dict[str, Any]
) -> str:
    """Two batches on a backend of its own; the digest of what they made, on rank 0."""
    backend = TorchBackend(device="cpu", **options)
    data = [random_samples(seed) for seed in range(2)]
    gathered = train(backend, rank, world, store, state, algorithm, data, budget=150)[1]
    return "" if gathered is None else checkpoint.fingerprint(gathered)


@pytest.mark.parametrize("algorithm", EVERY_ROLE, ids=lambda algorithm: algorithm.name)
@pytest.mark.parametrize("compute", [Compute(), Compute(bf16=True)], ids=["fp32", "bf16"])
@pytest.mark.slow
def test_the_bytes_are_those_of_a_run_without_it(algorithm: Algorithm, compute: Compute) -> None:
    kept, moved = (
        run(None, 0, 1, HashStore(), small_state(), algorithm, {"compute": compute, "offload": roles})
        for roles in ((), ROLES)
    )
    assert moved == kept


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"reshard": True}, {"compute": Compute(bf16=True)}], ids=str)
def test_the_bytes_are_those_of_a_run_without_it_on_shards(ranks: Ranks, options: dict[str, Any]) -> None:
    for algorithm in EVERY_ROLE:
        kept, moved = (
            ranks.run(run, 2, small_state(), algorithm, {**options, "offload": roles})[0] for roles in ((), ROLES)
        )
        assert moved == kept


def test_an_adapter_leaves_with_its_base(tmp_path: Path) -> None:
    checkpoint.export(tmp_path, small_state())
    digests = []
    for roles in ((), (ACTOR,)):
        backend = TorchBackend(device="cpu", offload=roles)
        backend.form(0, 1, None, 30.0)
        trainer = Trainer(backend, policy("grpo"), Schedule(1e-3), lora=Lora(rank=2))
        trainer.load(checkpoint.adopt(tmp_path))
        train_share(trainer, random_samples(0), 0, 1)
        state = backend.gather()
        assert state is not None
        digests.append(checkpoint.fingerprint(state))
    assert digests[0] == digests[1]


def resident() -> int:
    """Bytes of memory that this process holds."""
    gc.collect()
    return int(psutil.Process().memory_info().rss)


@pytest.mark.slow
def test_memory_falls_while_a_role_is_idle() -> None:
    """A reference of 50 MB, and a critic with its moments of 150 MB."""
    state = small_state(hidden_size=256, intermediate_size=4096, num_hidden_layers=4, head_dim=32)
    backend = TorchBackend(device="cpu", offload=(REFERENCE, CRITIC))
    backend.form(0, 1, None, 30.0)
    trainer = Trainer(
        backend, policy("ppo", kl_coef=0.1), Schedule(1e-3), held={REFERENCE: lambda: state}, budget=10**6
    )
    trainer.load(state)
    train_share(trainer, random_samples(0), 0, 1)
    shelves = backend._shelves
    weights = sum(weight.numel() * 4 for weight in state.weights.values())
    assert shelves[REFERENCE].size >= weights > 50e6
    assert shelves[CRITIC].size > 2.9 * weights
    for role in (REFERENCE, CRITIC):
        idle = resident()
        shelves[role].fetch()
        used = resident()
        assert used - idle > 0.9 * shelves[role].size
        shelves[role].put_back()
        assert used - resident() > 0.9 * shelves[role].size
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in backend._roles[role]._shards)
    backend.tear_down()


def test_what_measures_the_policy_finds_it_on_the_device() -> None:
    backend = TorchBackend(device="cpu", offload=ROLES)
    backend.form(0, 1, None, 30.0)
    trainer = Trainer(backend, Distill(), Schedule(1e-3), held=HELD)
    trainer.load(small_state())
    kept = TorchBackend(device="cpu")
    kept.form(0, 1, None, 30.0)
    Trainer(kept, Distill(), Schedule(1e-3), held=HELD).load(small_state())
    batch = pack(random_samples(0))
    ours, theirs = (
        Distill().evaluate(of.passes(batch.attach(keep=torch.ones(batch.trainable)))) for of in (backend, kept)
    )
    assert ours[0].item() == theirs[0].item()
    assert all(bool(torch.isfinite(p).all()) and p.numel() for p in backend.model.parameters())
    train_share(trainer, random_samples(0), 0, 1)
    assert backend.vocabulary == kept.vocabulary


def test_views_and_empty_tensors_come_back() -> None:
    whole, empty = torch.arange(1000.0), torch.zeros(0)
    view, other = whole[10:20], torch.full((3, 3), 7, dtype=torch.int8)
    shelf = TensorShelf(torch.device("cpu"))
    for _ in range(2):
        shelf.put([whole, view, empty, other])
        assert whole.untyped_storage().nbytes() == 0
        shelf.fetch()
        shelf.fetch()
        assert torch.equal(whole, torch.arange(1000.0))
        assert torch.equal(view, torch.arange(10.0, 20.0))
        assert other.tolist() == [[7] * 3] * 3
        shelf.put_back()
        shelf.fetch()
        assert torch.equal(whole, torch.arange(1000.0))


def test_what_cannot_leave_is_refused() -> None:
    with pytest.raises(BadConfiguration, match="no role actress: choose actor, critic"):
        TorchBackend(device="cpu", offload=("actress",))
    for layout in ("deepspeed:d1", "megatron:d1"):
        with pytest.raises(BadConfiguration, match="keeps every role on the device"):
            make_backend(layout, offload=(REFERENCE,))
    assert isinstance(make_backend("torch:d1", device="cpu", offload=(REFERENCE,)), TorchBackend)
