"""A transformers model from a state, with packed attention. No collective, no network."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from millrace.trainers.backends.models.probe import check_stages, settle
from millrace.trainers.backends.models.rows import has_rows
from millrace.trainers.backends.models.stages import ONE_STAGE, PipelineStage, cut, name_of
from millrace.trainers.batches.attention import NAME
from millrace.trainers.errors import CheckpointError
from millrace.trainers.weights.model_class import SCALAR, learns, make, read_config, tensors_of
from millrace.trainers.weights.state import State

HEAD, SCORE = "lm_head.weight", "score.weight"
CAUSAL = "ForCausalLM"


def build(
    assets: Mapping[str, bytes], weights: Mapping[str, torch.Tensor], stage: PipelineStage = ONE_STAGE
) -> PreTrainedModel:
    """The model that config.json describes, in fp32, of `weights`, its constants included (`State.tensors`).
    CheckpointError where they differ. stage: the part of it that is left, of the whole model's `weights`."""
    if "config.json" not in assets:
        raise CheckpointError("no config.json in the state; start from a directory in Hugging Face layout")
    settings = json.loads(assets["config.json"])
    model = _empty(settings)
    tensors = tensors_of(model)
    missing, unknown = sorted(tensors.keys() - weights.keys()), sorted(weights.keys() - tensors.keys())
    if missing or unknown:
        raise CheckpointError(
            f"weights do not fit {type(model).__name__}: missing {missing[:3]}, unknown {unknown[:3]}; "
            "config.json and model.safetensors must be of one model"
        )
    for name, tensor in tensors.items():
        if tensor.shape != weights[name].shape:
            raise CheckpointError(
                f"{name} is {tuple(weights[name].shape)} in the weights, {tuple(tensor.shape)} in config.json"
            )
    settle(model, weights, assets["config.json"])
    if stage.count > 1 and not has_rows(model):
        check_stages(model, (_stage(settings, index, stage.count) for index in range(stage.count)), weights)
    cut(model, stage)
    with torch.no_grad():
        for local_name, tensor in tensors_of(model).items():
            tensor.copy_(weights[name_of(model, local_name)])
    model.train(True)
    return model


def _empty(settings: Mapping[str, object]) -> PreTrainedModel:
    """The model of a config.json, its numbers not set: until they are, they take no memory."""
    with no_init_weights():
        model = make(settings, NAME)
    model.tie_weights()
    _freeze(model)
    return model


def _stage(settings: Mapping[str, object], index: int, count: int) -> PreTrainedModel:
    model = _empty(settings)
    cut(model, PipelineStage(index, count))
    return model


def _freeze(model: PreTrainedModel) -> None:
    """Makes buffers of the parameters that a class has frozen, so that no backend cuts, narrows or updates them."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not learns(parameter):
                delattr(module, name)
                module.register_buffer(name, parameter.detach())


def narrow_tables(model: PreTrainedModel) -> None:
    """For a model that computes in bf16: tables that files hold (of sines, of decays) become bf16, as hidden states
    meet them. Vectors and numbers, such as the bias of an expert's score, stay as they are."""
    tables = tensors_of(model).keys() - dict(model.named_parameters()).keys()
    for name in tables:
        table = model.get_buffer(name)
        if table.is_floating_point() and table.numel() > max(1, *table.shape[-1:]):
            table.data = table.data.to(torch.bfloat16)


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


def with_scalar_head(state: State) -> State:
    """A value model that starts from a policy: its layers, and a head of zeros. No moments, step 0, and
    of the policy's other files its configuration alone."""
    settings = json.loads(state.assets["config.json"])
    names = settings.get("architectures") or []
    stem = names[0].removesuffix(CAUSAL) if names else settings["model_type"].capitalize()
    settings |= {"architectures": [f"{stem}{SCALAR}"], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    settings["tie_word_embeddings"] = False
    weights, constants = (
        {name: tensor for name, tensor in tensors.items() if not name.startswith("lm_head.")}
        for tensors in (state.weights, state.constants)
    )
    weights[SCORE] = torch.zeros(1, getattr(read_config(settings).get_text_config(), "hidden_size", 0))
    assets = {"config.json": (json.dumps(settings, indent=2) + "\n").encode()}
    return State(weights, assets, seed=state.seed, constants=constants)


def random_state(settings: Mapping[str, object], seed: int = 0) -> State:
    """A state with random weights of the model that the settings of a config.json describe, without a tokenizer."""
    torch.manual_seed(seed)
    tensors = tensors_of(make(settings))
    weights = {name: tensor.detach().clone() for name, tensor in tensors.items() if learns(tensor)}
    constants = {name: tensor.detach().clone() for name, tensor in tensors.items() if not learns(tensor)}
    assets = {"config.json": (json.dumps(dict(settings)) + "\n").encode()}
    return State(weights, assets, seed=seed, constants=constants)
