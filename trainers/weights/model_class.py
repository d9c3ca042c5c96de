"""The transformers model that a config.json describes: its configuration, its class, and which of its tensors learn.

A config.json that names a `...ForSequenceClassification` has a scalar head (`score.weight`, no bias) instead of a
vocabulary: a critic or a reward model. Its layout is the one that servers of reward models load.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from millrace.trainers.errors import CheckpointError
from millrace.trainers.private_apis.transformers import has_class

log = logging.getLogger("millrace.models")

SCALAR = "ForSequenceClassification"
MULTIMODAL = "ForConditionalGeneration"
"""how the classes of models that read more than text end"""
LENGTHS = ("max_position_embeddings", "max_seq_len", "max_target_positions")
"""names, in the configurations of transformers, of the most tokens that positions are made for"""
_EAGER = "eager"
ANY_LENGTH = 2**31
"""of a model whose positions have no end: ALiBi, layers with a state"""


def is_scalar(settings: Mapping[str, Any]) -> bool:
    """Whether a config.json describes a model with a score in place of a vocabulary."""
    return any(name.endswith(SCALAR) for name in settings.get("architectures") or ())


def read_config(settings: Mapping[str, object]) -> PretrainedConfig:
    """The configuration that a config.json describes. CheckpointError where `transformers` knows no such model."""
    kind = settings.get("model_type")
    rest = {name: value for name, value in settings.items() if name != "model_type"}
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise CheckpointError(
            f"config.json names the model type {kind!r}, which transformers {transformers.__version__} does not have: "
            "name a model without code of its own"
        )
    config: PretrainedConfig = AutoConfig.for_model(kind, **_numbers(rest))
    return config


def _numbers(value: object) -> Any:
    """With the numbers that transformers writes as {"__float__": "Infinity"}, since JSON has none."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {name: _numbers(item) for name, item in value.items()}
    return [_numbers(item) for item in value] if isinstance(value, list) else value


def context_length(config: PretrainedConfig) -> int:
    """The most tokens that a model of this configuration takes."""
    text = config.get_text_config()
    return next((int(getattr(text, name)) for name in LENGTHS if getattr(text, name, None)), ANY_LENGTH)


def vocabulary_of(config: PretrainedConfig) -> int:
    """How many tokens a model of this configuration knows."""
    return int(config.get_text_config().vocab_size)


def forget_dropout(config: PretrainedConfig) -> None:
    """Sets each probability of dropout to 0, in parts of the configuration too, and says so in the log. A ratio of
    policies is that of the policies then: with dropout even the first one of a batch would differ from 1."""
    if hasattr(config, "rescale_every"):
        config.rescale_every = 0  # rwkv would halve its weights in place to answer, and double them to train
    rates = {name: rate for name, rate in vars(config).items() if "drop" in name and isinstance(rate, float) and rate}
    for name in rates:
        setattr(config, name, 0.0)
    if rates:
        log.info("%s trains without its dropout (%s)", config.model_type, ", ".join(sorted(rates)))
    for part in vars(config).values():
        if isinstance(part, PretrainedConfig):
            forget_dropout(part)


def make(settings: Mapping[str, Any], attention: str | None = None) -> PreTrainedModel:
    """The model of a config.json, in fp32 and without dropout, where torch makes tensors by default. attention: the
    name of the one that it computes, transformers' own where None or where the class knows its own attentions alone.
    CheckpointError where transformers has no such class, or makes no model of these settings."""
    config = read_config(settings)
    forget_dropout(config)
    if not is_scalar(settings):
        model = _of_class(AutoModelForCausalLM, config, "vocabulary", attention)
        _check_is_whole(settings, type(model).__name__)
        return model
    config.num_labels = 1
    model = _of_class(AutoModelForTokenClassification, config, "score", attention)
    head = getattr(model, "score", None)
    if not isinstance(head, torch.nn.Linear):
        raise CheckpointError(f"{type(model).__name__} has no score head; critics and reward models need one")
    model.score = torch.nn.Linear(head.in_features, 1, bias=False)
    model.dropout = torch.nn.Identity()  # before the head it would be noise on a target
    return model


def _check_is_whole(settings: Mapping[str, Any], built: str) -> None:
    """CheckpointError for the files of a larger model, of which only the part that writes text would be saved, under
    names that what reads config.json does not know."""
    larger = [name for name in settings.get("architectures") or () if name.endswith(MULTIMODAL) and name != built]
    if larger:
        raise CheckpointError(
            f"config.json names {larger[0]}, and of that only {built} would train and be saved: write this part into a "
            "directory of its own with transformers, `AutoModelForCausalLM.from_pretrained(SOURCE)"
            ".save_pretrained(TARGET)`, copy the tokenizer's files there, and name TARGET"
        )


def _of_class(auto: Any, config: PretrainedConfig, head: str, attention: str | None) -> PreTrainedModel:
    if not has_class(auto, config):
        raise CheckpointError(f"transformers has no {config.model_type} with a {head}: name another model")
    try:
        model: PreTrainedModel = auto.from_config(config, dtype=torch.float32, attn_implementation=attention)
    except Exception as error:  # any model's own code
        if isinstance(error, KeyError) and attention not in (None, _EAGER):
            return _of_class(auto, config, head, _EAGER)
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise CheckpointError(
            f"transformers makes no {config.model_type} of this config.json ({reason}): install what it asks for, or "
            "name another model"
        ) from error
    return model


def tensors_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Everything that a model's files hold, by the model's own names: parameters, each once, and persistent buffers."""
    written = model.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in written}
    return {**dict(model.named_parameters()), **buffers}


def learns(tensor: torch.Tensor) -> bool:
    """Whether a tensor of a model as its class makes it learns by gradients."""
    return tensor.requires_grad
