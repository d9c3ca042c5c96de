"""LoRA: a frozen base and a small adapter that alone learns.

    y = W x + (alpha / rank) B A x           A [rank, in], B [out, rank] of each target, in fp32; B starts at zero

Invariants: the base of an adapter is a model directory that never changes, known by the digest of its weights, and is
what engines load (in config.json's dtype), so learner and engine add the adapter to the same numbers; moments exist of
adapter parameters alone; a fresh adapter depends on the seed and on names, not on ranks or on the order of layers.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from millrace.trainers.errors import BadConfiguration, CheckpointError
from millrace.trainers.weights import manifest
from millrace.trainers.weights.adapter import A, Adapter, B, Lora
from millrace.trainers.weights.state import State, dtype_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NAME = "default"
"""peft's name of the one adapter of a model"""


def prepare(state: State, lora: Lora | None) -> State:
    """`state` as `lora` wants it: with a fresh adapter, with its own, or (None) with its adapter merged. Where that
    changes it, it begins with step 0 and no moments. Raises BadConfiguration for an adapter of another shape."""
    if lora is None:
        return state if state.adapter is None else merge(state)
    if state.adapter is None:
        return _begin(state, lora)
    settings = replace(state.adapter.lora, publish=lora.publish)
    if settings != lora:
        raise BadConfiguration(
            f"the version has an adapter of rank {settings.rank}, alpha {settings.alpha} on "
            f"{', '.join(settings.targets)}; keep these, or train one version without an adapter, which merges it, and "
            "begin anew"
        )
    return replace(state, adapter=replace(state.adapter, lora=lora))


def merge(state: State) -> State:
    """The full model that a state with an adapter stands for: no adapter, no moments, step 0."""
    adapter = state.adapter
    if adapter is None:
        return state
    weights = dict(state.weights)
    for name in adapter.weights:
        layer = name.removesuffix(A)
        if layer != name:
            change = adapter.weights[layer + B] @ adapter.weights[name]
            weights[f"{layer}.weight"] = weights[f"{layer}.weight"] + adapter.lora.scale * change
    return replace(state, weights=weights, moments={}, step=0, adapter=None, source=None)


def attach(model: PreTrainedModel, adapter: Adapter) -> None:
    """Puts the adapter into `model`, in place, and freezes everything else. Raises CheckpointError where they
    differ, BadConfiguration where the model takes none."""
    from peft import LoraConfig, inject_adapter_in_model

    modules = dict(model.named_modules(remove_duplicate=False))
    places = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    layers = sorted({name.removesuffix(A).removesuffix(B) for name in adapter.weights})
    for layer in layers:
        module = modules.get(layer)
        if module is None:
            raise CheckpointError(f"the adapter is not of this model, which has no layer {layer}")
        if not isinstance(module, torch.nn.Linear):
            raise BadConfiguration(f"{layer} is a {type(module).__name__}, which takes no adapter: name other targets")
        if hasattr(model.get_submodule(layer.rpartition(".")[0]), "D"):  # of Mamba: D is what a state passes by
            raise BadConfiguration(f"{layer} has kernels that read its weight past an adapter: name other targets")
        if places[id(module.weight)] > 1:
            raise BadConfiguration(f"{type(model).__name__} has {layer} in several places, which takes no adapter")
    settings = adapter.lora
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=[f"0.{layer}" for layer in layers],
        init_lora_weights=False,
    )
    with torch.random.fork_rng(devices=[]):  # peft draws numbers that are overwritten below
        # in a list, peft does not see that it is of transformers: of some mixtures of experts it would take the layers
        # beside the experts, which have the same names, for the experts
        inject_adapter_in_model(config, torch.nn.ModuleList([model]), adapter_name=_NAME)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_adapter = _is_ours(name)
            parameter.requires_grad_(is_adapter)
            if is_adapter:
                parameter.copy_(adapter.weights[file_name(name)])


def file_name(name: str) -> str:
    """A parameter's name as states and files have it: without what peft adds inside a model."""
    return name.replace(f".{_NAME}.weight", ".weight").replace(".base_layer.", ".")


def peft_config(lora: Lora) -> dict[str, object]:
    """The content of adapter_config.json, in an order that never changes."""
    from peft import LoraConfig

    config: Any = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.targets), bias="none")
    content = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    return {**dict(sorted(content.items())), "task_type": "CAUSAL_LM", "inference_mode": True}


def _begin(state: State, lora: Lora) -> State:
    if state.source is None:
        raise BadConfiguration("an adapter needs a base on disk: load a state that was read from a directory")
    dtype = dtype_of(state.assets)
    weights = {name: tensor.to(dtype).float() for name, tensor in state.weights.items()}
    fresh: dict[str, torch.Tensor] = {}
    for layer in _layers(weights, lora):
        rows, columns = weights[f"{layer}.weight"].shape
        fresh[layer + A] = _uniform((lora.rank, columns), 1 / math.sqrt(columns), (state.seed, _number(layer)))
        fresh[layer + B] = torch.zeros(rows, lora.rank)
    adapter = Adapter(lora, state.source, manifest.base_digest(state.source), fresh)
    return replace(state, weights=weights, moments={}, step=0, adapter=adapter, source=None)


def _layers(weights: Mapping[str, torch.Tensor], lora: Lora) -> list[str]:
    """The layers that the targets name, in order. Raises BadConfiguration for a target that names none."""
    linear = [name.removesuffix(".weight") for name, t in weights.items() if name.endswith(".weight") and t.ndim == 2]
    for target in lora.targets:
        if not any(layer.rpartition(".")[2] == target for layer in linear):
            names = sorted({layer.rpartition(".")[2] for layer in linear} - {"embed_tokens", "lm_head"})
            raise BadConfiguration(f"the model has no layer {target} to adapt; it has {', '.join(names)}")
    return [layer for layer in linear if layer.rpartition(".")[2] in lora.targets]


def _is_ours(name: str) -> bool:
    return f".lora_A.{_NAME}." in name or f".lora_B.{_NAME}." in name


def _number(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")


def _uniform(shape: tuple[int, int], limit: float, seed: tuple[int, int]) -> torch.Tensor:
    """fp32, uniform in [-bound, bound)."""
    draws = np.random.default_rng(np.random.SeedSequence(seed)).random(shape, np.float32)
    return torch.from_numpy((2 * draws - 1) * np.float32(limit))
