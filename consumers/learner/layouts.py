"""From `[learner] backend` to a backend: a layout in AReaL's grammar, where a bare name means one rank a cell, and the
options that the backend which it names takes. Cheap to import.

Invariant: an option that the chosen backend does not know is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from infra import config
from infra.errors import ConfigError
from trainers.backends.layout import DEEPSPEED, ENGINES, TORCH, Layout, parse, parse_allocation
from trainers.errors import BadConfiguration

if TYPE_CHECKING:
    from trainers.backends.adam import Adam
    from trainers.backends.base import Backend

OF: Mapping[str, tuple[str, ...]] = {
    "precision": (TORCH, DEEPSPEED),
    "activation_checkpointing": (TORCH,),
    "reshard": (TORCH,),
    "offload": (TORCH,),
    "pipeline_schedule": (TORCH,),
    "zero_stage": (DEEPSPEED,),
    "zero_offload": (DEEPSPEED,),
}
"""setting -> the backends that have it"""


def chosen(learner: config.Learner) -> Layout:
    """The layout that `[learner] backend` names; as many learners as there are decide its d. ConfigError, with the
    reason, where it is none."""
    text = learner.backend if ":" in learner.backend else f"{learner.backend}:d1"
    try:
        components = parse_allocation(text).components
        if any(component.name for component in components):
            actor = next((component for component in components if component.name == "actor"), components[0])
            raise BadConfiguration(
                f"{text}: in the loop all roles share the learners' ranks; write one layout, {actor.layout}"
            )
        layout = parse(text)
    except BadConfiguration as error:
        raise ConfigError(f"[learner] backend: {error}") from None
    if layout.backend in ENGINES:
        raise ConfigError(f"[learner] backend: {layout.backend} serves and does not train")
    return layout


def canonical(learner: config.Learner) -> str:
    """One text for all settings of `backend` that train alike, whatever their d."""
    layout = chosen(learner)
    return str(layout.within(layout.unit))


def check(learner: config.Learner, shards: int) -> Layout:
    """The layout, after all that can be said without a model. ConfigError for what cannot be.

    shards: partitions of the trajectories, one a learner at least."""
    layout = chosen(learner)
    for name, backends in OF.items():
        default = config.Learner.model_fields[name].default
        if getattr(learner, name) != default and layout.backend not in backends:
            raise ConfigError(
                f"[learner] {name}: backend {layout.backend} has no such option, only {', '.join(backends)}"
            )
    if layout.unit > shards:
        raise ConfigError(
            f"[learner] backend {learner.backend} trains with {layout.unit} learners, and [topics] shards = {shards} "
            f"lets {shards} share a policy: choose a smaller layout, or a new namespace with more shards"
        )
    if learner.lora.rank and layout.unit > 1:
        raise ConfigError(
            f"[learner] lora: an adapter trains with data parallelism alone; backend = {layout.backend!r} does"
        )
    return layout


def made(learner: config.Learner, layout: Layout, adam: Adam) -> Backend:
    """An unformed backend for `layout`, with the options of `learner`."""
    if layout.backend == DEEPSPEED:
        from trainers.backends.deepspeed import DeepSpeedBackend

        return DeepSpeedBackend(
            adam,
            parallel=layout,
            stage=learner.zero_stage,
            offload=learner.zero_offload,
            bf16=learner.precision == "bf16",
        )
    from trainers.backends.factory import make_backend

    if layout.backend != TORCH:
        return make_backend(layout, adam)
    from trainers.backends.compute import Compute

    return make_backend(
        layout,
        adam,
        offload=learner.offload,
        compute=Compute(learner.precision == "bf16", learner.activation_checkpointing),
        reshard=learner.reshard,
        schedule=learner.pipeline_schedule,
    )


def started(learner: config.Learner) -> int:
    """Learners that `millrace up` starts: as many as asked for, and no fewer than the layout as written has ranks."""
    return max(learner.learners, chosen(learner).world) if learner.learners else 0


def awaited(learner: config.Learner, here: int) -> str:
    """What so many learners wait for, who are too few."""
    unit = chosen(learner).unit
    more = "another" if unit - here == 1 else f"{unit - here} more"
    return f"{_learners(here)} here, {learner.backend} trains with {unit}: start {more}"


def spare(learner: config.Learner, here: int) -> str:
    """Why one of so many learners waits while others train."""
    unit = chosen(learner).unit
    return f"{_learners(here)} here, {learner.backend} trains with multiples of {unit}: this one waits as a spare"


def _learners(count: int) -> str:
    return f"{count} learner" if count == 1 else f"{count} learners"
