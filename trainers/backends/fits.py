"""Whether a model divides as a layout says, from its configuration alone: what can be refused before ranks meet.

What only the built model shows (layers that cannot be cut, experts of other forms) its loading refuses.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig

from millrace.trainers.backends.layout import MEGATRON, Layout
from millrace.trainers.errors import BadConfiguration, CheckpointError


def check(layout: Layout, assets: Mapping[str, bytes]) -> None:
    """BadConfiguration, with the reason, where it does not. assets: files of the model, config.json among them."""
    if "config.json" not in assets:
        raise CheckpointError("no config.json in the state; start from a directory in Hugging Face layout")
    try:
        if layout.backend == MEGATRON:
            from millrace.trainers.backends.megatron import config as megatron

            megatron.check(megatron.architecture(assets), layout)
        else:
            _torch(layout, json.loads(assets["config.json"]))
    except BadConfiguration as error:
        raise BadConfiguration(f"{layout}: {error}") from None


def _torch(layout: Layout, settings: dict[str, Any]) -> None:
    from millrace.trainers.backends.parallel import stages, tensor

    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    if layout.t > 1:
        tensor.check(config, layout.t)
    if layout.p > 1:
        stages.check(config, layout.p)
