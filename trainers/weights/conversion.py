"""Tensors in files <-> tensors of the model, as transformers converts them.

Files hold what was published: an expert's matrices one by one, names of an older code. The model has them stacked and
under names of its modules. transformers knows for each class how one becomes the other; so what it reads is read here,
and what is written here it reads, and so do engines.

    files of any layout that transformers reads  --from_files-->  weights, constants  --to_files-->  its public layout

Constants are what files hold and no gradient changes: persistent buffers (the bias that corrects an expert's score,
scales of layers) and parameters that their class has frozen (tables of sines). No rule changes them either, such as
the balancing of experts without a loss; versions have them bit for bit.

Invariant: the layout of what is written is a function of config.json.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from functools import lru_cache

import torch
from transformers import PreTrainedModel

from millrace.trainers.errors import CheckpointError
from millrace.trainers.private_apis import transformers as private
from millrace.trainers.weights.model_class import learns, make, tensors_of

log = logging.getLogger("millrace.weights")

Tensors = dict[str, torch.Tensor]


def from_files(settings: Mapping[str, object], files: Mapping[str, torch.Tensor]) -> tuple[Tensors, Tensors]:
    """The weights and the constants, in float32 where they float, of the model of a config.json. CheckpointError, with
    the first names, where the files are not of it."""
    model = _outline(settings)
    name = f"{type(model).__name__} ({model.config.model_type})"
    if settings.get("quantization_config"):
        raise CheckpointError(
            f"the weights of this {name} are quantised ({_method(settings)}), which cannot be trained: save it with "
            "transformers in bfloat16 without its quantization_config, and start from that"
        )
    learning = {name for name, tensor in tensors_of(model).items() if learns(tensor)}
    report = private.fill(model, files)
    if report.misfits:
        first, reason = next(iter(sorted(report.misfits.items())))
        raise CheckpointError(f"{first} of {name} {reason}: config.json and the weights must be of one model")
    if report.gaps or report.strangers:
        raise CheckpointError(
            f"weights do not fit {name}: missing {report.gaps[:3]}, unknown {report.strangers[:3]}; "
            "config.json and model.safetensors must be of one model"
        )
    if report.twins:
        raise CheckpointError(
            f"config.json ties {report.twins[0]} of {name} to another weight, and the files hold two that differ: set "
            "tie_word_embeddings to false there"
        )
    if report.defaults:
        log.warning("%s: no file has %s, which begin as transformers begins them", name, ", ".join(report.defaults[:3]))
    tensors = {name: tensor.detach() for name, tensor in tensors_of(model).items()}
    return (
        {name: tensor for name, tensor in tensors.items() if name in learning},
        {name: tensor for name, tensor in tensors.items() if name not in learning},
    )


def to_files(config: bytes, tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """The tensors of a model, by its own names, as the files of a model directory hold them. `config`: of config.json.
    Shares memory with what it is given."""
    return private.in_files(_cached_outline(config), tensors)


def _outline(settings: Mapping[str, object]) -> PreTrainedModel:
    """The model without numbers."""
    with torch.device("meta"):
        return make(settings)


@lru_cache(maxsize=8)
def _cached_outline(config: bytes) -> PreTrainedModel:
    return _outline(json.loads(config))


def _method(settings: Mapping[str, object]) -> str:
    about = settings["quantization_config"]
    return str(about.get("quant_method", "unnamed")) if isinstance(about, Mapping) else "unnamed"
