"""transformers: its auto classes, and the attention that a model uses."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig


def has_class(auto: Any, config: PretrainedConfig) -> bool:
    """Whether an auto class of transformers, such as AutoModelForCausalLM, has a model for this configuration."""
    return type(config) in auto._model_mapping


def attention_of(config: PretrainedConfig) -> str:
    """The name of the attention that models of this configuration use."""
    return str(config._attn_implementation)


def set_attention(config: PretrainedConfig, name: str) -> None:
    """Makes the modules that hold this configuration attend by the attention of this name."""
    config._attn_implementation = name
