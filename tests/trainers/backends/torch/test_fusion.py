"""Layers in fewer kernels compute what they computed, or are refused by name."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from millrace.trainers.algorithms.registry import policy
from millrace.trainers.backends.models.build import build
from millrace.trainers.backends.torch import fusion
from millrace.trainers.backends.torch.backend import TorchBackend
from millrace.trainers.backends.torch.compute import Compute
from millrace.trainers.backends.torch.fusion import fuse
from millrace.trainers.errors import BadConfiguration
from millrace.trainers.learning import Schedule, Trainer
from tests.support.samples import random_samples, small_state
from tests.support.steps import train_share

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def trained(compute: Compute) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    backend = TorchBackend(device="cpu", compute=compute)
    backend.form(0, 1, None, 30.0)
    trainer = Trainer(backend, policy("grpo"), Schedule(1e-3), budget=150)
    trainer.load(small_state("qwen3"))
    for seed in range(2):
        train_share(trainer, random_samples(seed), 0, 1, seed)
    state = backend.gather()
    assert state is not None
    return state.weights, trainer.kernels


@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
def test_compiled_layers_train_alike(checkpointing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers are traced, for rows of any length, and run as traced; code for a device is torch's own matter."""
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **settings: compiled(f, backend="aot_eager", **settings))
    plain, kernels = trained(Compute(checkpointing=checkpointing))
    assert (kernels["fusion"], kernels["attention"], kernels["repeatable"]) == ("none", "runs", "true")
    fused, kernels = trained(Compute(checkpointing=checkpointing, fusion="compile"))
    assert kernels["fusion"] == "compile"
    for name, tensor in plain.items():
        assert torch.allclose(tensor, fused[name], atol=2e-5), name


def test_layers_that_keep_their_products_train_to_the_last_bit() -> None:
    plain, selective = trained(Compute())[0], trained(Compute(checkpointing="selective"))[0]
    assert all(torch.equal(tensor, selective[name]) for name, tensor in plain.items())


@pytest.mark.parametrize(
    ("packages", "kind", "compiler", "chosen"),
    [
        ({"liger_kernel", "triton"}, "qwen3", "gcc", "liger"),
        ({"liger_kernel", "triton"}, "unheard_of", "gcc", "compile"),
        ({"triton"}, "qwen3", "gcc", "compile"),
        ({"triton"}, "qwen3", None, "none"),
        (set(), "qwen3", "gcc", "none"),
    ],
)
def test_what_a_card_takes_by_itself(
    packages: set[str], kind: str, compiler: str | None, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fusion, "find_spec", lambda name: name in packages or None)
    monkeypatch.setattr(fusion, "knows", lambda name: name == "qwen3")
    monkeypatch.setattr(fusion.shutil, "which", lambda name: compiler)
    assert fusion._choose(kind, CUDA) == chosen
    assert fusion._choose(kind, CPU) == "none"


def test_liger_is_refused_where_it_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    state = small_state("qwen3")
    model = build(state.assets, state.weights)
    if importlib.util.find_spec("liger_kernel") is None:
        with pytest.raises(BadConfiguration, match="liger-kernel is not installed"):
            fuse(model, (), "liger", CUDA)
    monkeypatch.setattr(fusion, "_has_liger", lambda: True)
    monkeypatch.setattr(fusion, "knows", lambda kind: False)
    with pytest.raises(BadConfiguration, match="on a GPU alone"):
        fuse(model, (), "liger", CPU)
    with pytest.raises(BadConfiguration, match="does not know qwen3 models"):
        fuse(model, (), "liger", CUDA)
