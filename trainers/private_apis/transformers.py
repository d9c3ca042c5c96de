"""transformers: its auto classes, the attention that a model uses, and how its files are read and written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model, revert_weight_conversion
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging


def has_class(auto: Any, config: PretrainedConfig) -> bool:
    """Whether an auto class of transformers, such as AutoModelForCausalLM, has a model for this configuration."""
    return type(config) in auto._model_mapping


def attention_of(config: PretrainedConfig) -> str:
    """The name of the attention that models of this configuration use."""
    return str(config._attn_implementation)


def set_attention(config: PretrainedConfig, name: str) -> None:
    """Makes the modules that hold this configuration attend by the attention of this name."""
    config._attn_implementation = name


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What does not fit between files and a model, by name. gaps: of the model, in no file; strangers: of the files,
    but for what the class leaves out; misfits: name -> what is wrong; twins: one by the class, and two in the files.
    defaults: in no file, and as the class begins them, of what does not learn."""

    gaps: list[str]
    strangers: list[str]
    misfits: Mapping[str, str]
    twins: list[str]
    defaults: list[str]


def fill(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> LoadReport:
    """Loads tensors by their names in files into a model on the meta device, as `from_pretrained` does: renamed,
    stacked and split as transformers knows it of this class; what floats becomes float32."""
    shared = set(model.all_tied_weights_keys)
    learning = {name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.requires_grad}
    mapping: Any = get_model_conversion_mapping(model)
    about = LoadStateDictConfig(dtype=torch.float32, weight_mapping=mapping)
    with _no_progress_bar():
        info, _ = convert_and_load_state_dict_in_model(model, dict(tensors), about, None)
    model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
    model._adjust_missing_and_unexpected_keys(info)
    misfits = {
        name: f"is {tuple(ours)} in the files, {tuple(theirs)} in the model"
        for name, ours, theirs in info.mismatched_keys
    }
    misfits |= {name: _reason(text) for name, text in info.conversion_errors.items()}
    rest = {name for name, tensor in model.state_dict().items() if tensor.is_meta} - learning - misfits.keys()
    gaps = (info.missing_keys & learning - misfits.keys()) | _begin(model, rest)
    twins = shared - set(model.all_tied_weights_keys)
    return LoadReport(sorted(gaps), sorted(info.unexpected_keys), misfits, sorted(twins), sorted(rest - gaps))


def _begin(model: PreTrainedModel, names: set[str]) -> set[str]:
    """Makes tensors that no file has, such as tables of sines, what the class makes of them at first. Those of which it
    makes nothing."""
    if not names:
        return set()
    some: Any = names
    model._move_missing_keys_from_meta_to_device(some, None, None, None)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for name in names:
            tensor = model.get_parameter_or_buffer(name)
            tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
        model._initialize_missing_keys(is_quantized=False)
    tensors = {name: model.get_parameter_or_buffer(name) for name in names}
    return {name for name, tensor in tensors.items() if not tensor.is_floating_point() or bool(tensor.isnan().any())}


def _reason(text: str) -> str:
    """Of a conversion that failed: transformers gives a traceback, then the error."""
    lines = [line for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "Error:" in line and not line.startswith("Error:")), lines[-1])[:300]


def in_files(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A model's tensors by its own names -> as `save_pretrained` writes them. The model's own are not read."""
    return dict(revert_weight_conversion(model, dict(tensors)))


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
