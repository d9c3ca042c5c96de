"""How much of a device's arithmetic a run uses: model FLOPs utilisation.

    FLOPs a token = 6 (N - N_embedding) + 12 L H D c / 2        c: mean tokens before a token is predicted; causal
    MFU           = tokens/s x FLOPs a token / (devices x peak)

N counts every weight that is multiplied, so the embedding counts only where it is the head too; of experts only those
that a token visits. Forward once, backward twice; what is computed again (activation checkpointing, recomputed
log-probabilities) is not credited. The peak is the device's dense bf16 rate, whatever the run computes in.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from millrace.trainers.weights.state import State

PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}
"""Dense bf16 FLOPs a second by a part of the device's name; the first that fits counts."""


def peak(device: str) -> float | None:
    """Of a device by its name, such as `NVIDIA H100 80GB HBM3`; None where it is not known (every CPU)."""
    return next((rate for name, rate in PEAKS.items() if name in device), None)


def per_token(shapes: Iterable[tuple[str, tuple[int, ...]]], config: Mapping[str, Any], length: float) -> float:
    """FLOPs to train one token of sequences of `length`, for a model of these named weights and its configuration."""
    active = 0.0
    share = float(config.get("num_experts_per_tok") or 1) / float(config.get("num_experts") or 1)
    for name, shape in shapes:
        size = 1.0
        for side in shape:
            size *= side
        if len(shape) < 2 or (name.endswith("embed_tokens.weight") and not config.get("tie_word_embeddings")):
            continue
        active += size * (share if ".experts." in name else 1.0)
    heads = int(config.get("num_attention_heads") or 0)  # none where no layer attends
    width = int(config.get("head_dim") or int(config["hidden_size"]) // max(1, heads))
    return 6 * active + 12 * int(config["num_hidden_layers"]) * heads * width * length / 2


def mfu(tokens_per_second: float, flops: float, rate: float, devices: int = 1) -> float:
    """The share of `devices` peaks of `rate` that is used."""
    return tokens_per_second * flops / (rate * devices)


def utilisation(state: State, metrics: Mapping[str, float], devices: int) -> dict[str, float]:
    """`mfu` of a step that these metrics describe, trained on GPUs like this process's; nothing where their peak is not
    known, and on CPUs."""
    rate = peak(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    return {} if rate is None else _utilisation(state, metrics, rate, devices)


def _utilisation(state: State, metrics: Mapping[str, float], rate: float, devices: int) -> dict[str, float]:
    shapes = ((name, tuple(tensor.shape)) for name, tensor in state.weights.items())
    length = metrics["tokens_computed"] / max(1.0, metrics["samples"])
    cost = per_token(shapes, _numbers(state), length)
    return {"mfu": mfu(metrics["tokens_per_second"], cost, rate, devices)}


def _numbers(state: State) -> dict[str, Any]:
    """What `per_token` asks of a configuration, under whatever names its class has them."""
    from millrace.trainers.weights.model_class import read_config  # transformers takes seconds to load

    config = read_config(json.loads(state.assets["config.json"])).get_text_config()
    names = ("num_attention_heads", "head_dim", "hidden_size", "num_hidden_layers", "tie_word_embeddings")
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    numbers = {name: getattr(config, name, None) for name in (*names, "num_experts_per_tok")}
    return {**numbers, "num_experts": experts}
