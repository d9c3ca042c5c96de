"""Cuts a transformers model into pipeline stages.

Stage 0 has the embedding, the last one the final norm and the head, each some consecutive layers. A stage is still a
model of its class: it is called with `inputs_embeds` instead of tokens (not the first) and its logits are hidden states
(not the last), so whatever its class does between layers stays as it is. Its layers are numbered from 0; `name_of`
gives the names of the whole model.

Invariant: each parameter of the whole model is in exactly one stage.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from millrace.trainers.errors import BadConfiguration

_LAYER = re.compile(r"(.*\.layers\.)(\d+)(\..*)")
_HEADS = ("lm_head", "score")


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """One of `count`."""

    index: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether it reads tokens."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """Whether it has the head."""
        return self.index == self.count - 1

    def layers(self, total: int) -> range:
        """Its layers of `total`; earlier stages have one more where they do not divide."""
        share, more = divmod(total, self.count)
        start = self.index * share + min(self.index, more)
        return range(start, start + share + (self.index < more))


ONE_STAGE = PipelineStage()
_FIRST = "first_layer"
"""attribute of a stage: the number of its layer 0 in the whole model"""


def name_of(model: PreTrainedModel, name: str) -> str:
    """What a parameter that a stage, or a whole model, calls `own` is called in the whole model."""
    match, first = _LAYER.fullmatch(name), getattr(model, _FIRST, 0)
    return name if match is None else f"{match[1]}{int(match[2]) + first}{match[3]}"


def check(config: PretrainedConfig, count: int) -> None:
    """BadConfiguration, with the reason, unless a model of `config` makes `count` stages."""
    if config.get_text_config() is not config:
        raise BadConfiguration(f"{config.model_type} reads more than text and makes no pipeline stages; choose p1")
    total = int(config.num_hidden_layers)
    if total < count:
        raise BadConfiguration(f"{total} layers make no {count} pipeline stages; each needs one")
    if config.tie_word_embeddings:
        raise BadConfiguration(
            "the model ties its output to its input embeddings, which lie on the first and the last pipeline stage; "
            "choose p1, or a model with a head of its own"
        )


def cut(model: PreTrainedModel, stage: PipelineStage) -> None:
    """Leaves of a whole model what `stage` has, in place. BadConfiguration, with the reason, where it cannot be cut."""
    if stage.count == 1:
        return
    check(model.config, stage.count)
    total = int(model.config.num_hidden_layers)
    base: Any = model.base_model
    layers = stage.layers(total)
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[index] for index in layers]
    base.layers = base.layers[layers.start : layers.stop]
    model.config = base.config = config
    setattr(model, _FIRST, layers.start)
    if not stage.first:
        base.embed_tokens = torch.nn.Identity()
    if not stage.last:
        base.norm = torch.nn.Identity()
        for head in _HEADS:
            if hasattr(model, head):
                setattr(model, head, torch.nn.Identity())
