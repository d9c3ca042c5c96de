"""A transformers model from a state, with packed attention. No collective, no network."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from trainers.batches.attention import NAME
from trainers.errors import CheckpointError


def build(assets: Mapping[str, bytes], weights: Mapping[str, torch.Tensor]) -> PreTrainedModel:
    """The causal language model that config.json describes, in fp32 with `weights`; CheckpointError where they
    differ."""
    if "config.json" not in assets:
        raise CheckpointError("no config.json in the state; start from a directory in Hugging Face layout")
    settings = json.loads(assets["config.json"])
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with no_init_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=NAME)
    model.tie_weights()
    parameters = dict(model.named_parameters())
    missing, unknown = sorted(parameters.keys() - weights.keys()), sorted(weights.keys() - parameters.keys())
    if missing or unknown:
        raise CheckpointError(
            f"weights do not fit {type(model).__name__}: missing {missing[:3]}, unknown {unknown[:3]}; "
            "config.json and model.safetensors must be of one model"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            if parameter.shape != weights[name].shape:
                raise CheckpointError(
                    f"{name} is {tuple(weights[name].shape)} in the weights, {tuple(parameter.shape)} in config.json"
                )
            parameter.copy_(weights[name])
    model.train(True)
    return model
