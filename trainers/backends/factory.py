"""The backend that a layout names, made without importing any other."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from millrace.trainers.backends.base import Backend
from millrace.trainers.backends.layout import (
    DEEPSPEED,
    ENGINES,
    MEGATRON,
    TORCH,
    Allocation,
    Layout,
    parse,
    parse_allocation,
)
from millrace.trainers.errors import BadConfiguration, CheckpointError

if TYPE_CHECKING:
    from millrace.trainers.backends.base import Adam

SIBLINGS = {
    TORCH: "millrace.trainers.backends.torch.backend:TorchBackend",
    MEGATRON: "millrace.trainers.backends.megatron.backend:MegatronBackend",
    DEEPSPEED: "millrace.trainers.backends.deepspeed.backend:DeepSpeedBackend",
}
"""Backend -> module and class. Classes are called with (adam, parallel=layout, **options)."""


def make_backend(
    layout: Layout | str, adam: Adam | None = None, *, offload: Sequence[str] = (), **options: Any
) -> Backend:
    """An unformed backend for `layout`, such as torch:d2t2, or for an allocation whose components are roles. How many
    ranks come decides the d of what trains. BadConfiguration where the layout is none, its backend does not train, or
    it keeps on the device what `offload` names (roles that leave it between their uses); `options`: the sibling's
    own."""
    if isinstance(layout, str):
        allocation = parse_allocation(layout)
        if any(component.name for component in allocation.components):
            return _with_roles(allocation, adam, offload, options)
    plan = parse(layout) if isinstance(layout, str) else layout
    plan.check()
    if plan.backend not in SIBLINGS:
        serves = "serves and does not train" if plan.backend in ENGINES else "is not among them"
        raise BadConfiguration(f"{plan}: {plan.backend} {serves}; train with {', '.join(SIBLINGS)}")
    if offload:
        if plan.backend != TORCH:
            raise BadConfiguration(f"{plan.backend} keeps every role on the device: leave offload out, or use torch")
        options["offload"] = offload
    module, _, name = SIBLINGS[plan.backend].partition(":")
    backend: Backend = getattr(import_module(module), name)(adam, parallel=plan, **options)
    return backend


def _with_roles(
    allocation: Allocation, adam: Adam | None, offload: Sequence[str], options: Mapping[str, object]
) -> Backend:
    """`options` are for places of the actor's kind."""
    from millrace.trainers.backends.places import places_of
    from millrace.trainers.backends.roles import RolesBackend

    actor, *rest = places_of(allocation)

    def make(layout: Layout, idle: Sequence[str]) -> Backend:
        return make_backend(layout, adam, offload=idle, **(options if layout.backend == actor.layout.backend else {}))

    return RolesBackend(allocation, make, offload) if rest else make(actor.layout, offload)


def check_model(layout: Layout, assets: Mapping[str, bytes]) -> None:
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
    from transformers import AutoConfig

    from millrace.trainers.backends.models import stages
    from millrace.trainers.backends.parallel import tensor

    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    if layout.t > 1:
        tensor.check(config, layout.t)
    if layout.p > 1:
        stages.check(config, layout.p)
