"""A transformers model from a state, with packed attention. No collective, no network.

A state whose config.json names a `...ForSequenceClassification` has a scalar head (`score.weight`, no bias) instead of
a vocabulary: a critic or a reward model. Its layout is the one that servers of reward models load.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from transformers.initialization import no_init_weights

from millrace.trainers.backends.models.probe import settle
from millrace.trainers.backends.models.rows import EAGER
from millrace.trainers.backends.models.stages import ONE_STAGE, PipelineStage, cut, name_of
from millrace.trainers.batches.attention import NAME
from millrace.trainers.errors import CheckpointError
from millrace.trainers.private_apis.transformers import has_class
from millrace.trainers.weights.state import State

log = logging.getLogger("millrace.models")

HEAD, SCORE = "lm_head.weight", "score.weight"
CAUSAL, SCALAR = "ForCausalLM", "ForSequenceClassification"


def build(
    assets: Mapping[str, bytes], weights: Mapping[str, torch.Tensor], stage: PipelineStage = ONE_STAGE
) -> PreTrainedModel:
    """The model that config.json describes, in fp32 with `weights`; CheckpointError where they differ. stage: the part
    of it that is left, of the whole model's `weights`."""
    if "config.json" not in assets:
        raise CheckpointError("no config.json in the state; start from a directory in Hugging Face layout")
    settings = json.loads(assets["config.json"])
    scalar = is_scalar(settings)
    config = read_config(settings)
    forget_dropout(config)
    with no_init_weights():
        model: PreTrainedModel = _scalar(config) if scalar else _causal(config)
    model.tie_weights()
    parameters = dict(model.named_parameters())
    still = [name for name, parameter in parameters.items() if not parameter.requires_grad]
    if still:
        raise CheckpointError(
            f"{type(model).__name__} has parameters that never learn ({', '.join(still[:3])}), which versions do not "
            "keep: name another model"
        )
    missing, unknown = sorted(parameters.keys() - weights.keys()), sorted(weights.keys() - parameters.keys())
    if missing or unknown:
        raise CheckpointError(
            f"weights do not fit {type(model).__name__}: missing {missing[:3]}, unknown {unknown[:3]}; "
            "config.json and model.safetensors must be of one model"
        )
    for name, parameter in parameters.items():
        if parameter.shape != weights[name].shape:
            raise CheckpointError(
                f"{name} is {tuple(weights[name].shape)} in the weights, {tuple(parameter.shape)} in config.json"
            )
    settle(model, weights, assets["config.json"])
    cut(model, stage)
    with torch.no_grad():
        for local_name, parameter in model.named_parameters():
            parameter.copy_(weights[name_of(model, local_name)])
    model.train(True)
    return model


def forget_dropout(config: PretrainedConfig) -> None:
    """Sets each probability of dropout to 0, in parts of the configuration too, and says so in the log. A ratio of
    policies is that of the policies then: with dropout even the first one of a batch would differ from 1."""
    rates = {name: rate for name, rate in vars(config).items() if "drop" in name and isinstance(rate, float) and rate}
    for name in rates:
        setattr(config, name, 0.0)
    if rates:
        log.info("%s trains without its dropout (%s)", config.model_type, ", ".join(sorted(rates)))
    for part in vars(config).values():
        if isinstance(part, PretrainedConfig):
            forget_dropout(part)


@contextmanager
def inference_mode(models: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Inside, `models` only answer: without gradients, and drawing nothing."""
    before = [model.training for model in models]
    for model in models:
        model.train(False)
    try:
        with torch.no_grad():
            yield
    finally:
        for model, training in zip(models, before, strict=True):
            model.train(training)


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


def _causal(config: PretrainedConfig) -> PreTrainedModel:
    return _from_config(AutoModelForCausalLM, config, "vocabulary")


def _from_config(auto: Any, config: PretrainedConfig, head: str) -> PreTrainedModel:
    if not has_class(auto, config):
        raise CheckpointError(f"transformers has no {config.model_type} with a {head}: name another model")
    model: PreTrainedModel
    try:
        model = auto.from_config(config, dtype=torch.float32, attn_implementation=NAME)
    except KeyError:  # a class that knows its own attentions alone
        model = auto.from_config(config, dtype=torch.float32, attn_implementation=EAGER)
    return model


def _scalar(config: PretrainedConfig) -> PreTrainedModel:
    """A value after every token."""
    config.num_labels = 1
    model = _from_config(AutoModelForTokenClassification, config, "score")
    head = getattr(model, "score", None)
    if not isinstance(head, torch.nn.Linear):
        raise CheckpointError(f"{type(model).__name__} has no score head; critics and reward models need one")
    model.score = torch.nn.Linear(head.in_features, 1, bias=False)
    model.dropout = torch.nn.Identity()
    return model


def with_scalar_head(state: State) -> State:
    """A value model that starts from a policy: its layers, and a head of zeros. No moments, step 0, and
    of the policy's other files its configuration alone."""
    settings = json.loads(state.assets["config.json"])
    names = settings.get("architectures") or []
    stem = names[0].removesuffix(CAUSAL) if names else settings["model_type"].capitalize()
    settings |= {"architectures": [f"{stem}{SCALAR}"], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    settings["tie_word_embeddings"] = False
    weights = {name: tensor for name, tensor in state.weights.items() if not name.startswith("lm_head.")}
    weights[SCORE] = torch.zeros(1, int(read_config(settings).get_text_config().hidden_size))
    assets = {"config.json": (json.dumps(settings, indent=2) + "\n").encode()}
    return State(weights, assets, seed=state.seed)


def random_state(settings: Mapping[str, object], seed: int = 0) -> State:
    """A state with random weights of the model that the settings of a config.json describe, without a tokenizer."""
    torch.manual_seed(seed)
    model = _causal(read_config(settings))
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return State(weights, {"config.json": (json.dumps(dict(settings)) + "\n").encode()}, seed=seed)
