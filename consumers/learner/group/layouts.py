"""From `[learner] backend` to a backend: a layout in AReaL's grammar, where a bare name means one rank a cell, or
several, where roles have ranks of their own; and the options that the backend takes. Cheap to import.

Invariant: an option that the chosen backend does not know is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from millrace.consumers.learner.group.agreement import Need
from millrace.infra import config
from millrace.infra.errors import ConfigError
from millrace.trainers.backends.layout import ACTOR, DEEPSPEED, TORCH, Allocation, parse_allocation
from millrace.trainers.backends.places import RolePlace, format_places, places_of
from millrace.trainers.errors import BadConfiguration

if TYPE_CHECKING:
    from millrace.trainers.backends.base import Adam, Backend

OF: Mapping[str, tuple[str, ...]] = {
    "precision": (TORCH, DEEPSPEED),
    "activation_checkpointing": (TORCH,),
    "fusion": (TORCH,),
    "optimizer_offload": (TORCH,),
    "reshard": (TORCH,),
    "offload": (TORCH,),
    "pipeline_schedule": (TORCH,),
    "zero_stage": (DEEPSPEED,),
    "zero_offload": (DEEPSPEED,),
}
"""setting -> the backends that have it"""


def role_places(learner: config.Learner) -> list[RolePlace]:
    """What `[learner] backend` names: who plays what on which ranks, the actor first; as many learners as there are
    decide the d of its layout. ConfigError, with the reason, where it is none."""
    text = learner.backend if ":" in learner.backend else f"{learner.backend}:d1"
    try:
        allocation = parse_allocation(text)
        first, *more = allocation.components
        if not first.name and not more:
            allocation = Allocation(((replace(first, name=ACTOR),),))
        return places_of(allocation)
    except BadConfiguration as error:
        raise ConfigError(f"[learner] backend: {error}") from None


def need_of(learner: config.Learner) -> Need:
    """How many learners train so; a further one beside those that may is a spare."""
    actor, *serving_places = role_places(learner)
    limit = int(learner.optimizer_offload)  # the backend's own, of one rank
    return Need(actor.layout.unit, sum(place.layout.world for place in serving_places), limit)


def canonical(learner: config.Learner) -> str:
    """One text for all settings of `backend` that train alike, whatever their d."""
    actor, *serving_places = role_places(learner)
    layout = actor.layout.within(actor.layout.unit)
    return format_places([replace(actor, layout=layout), *serving_places]) if serving_places else str(layout)


def check(learner: config.Learner, shards: int) -> list[RolePlace]:
    """The places, after all that can be said without a model. ConfigError for what cannot be.

    shards: partitions of the trajectories, one a learner at least."""
    actor, *serving_places = role_places(learner)
    need, backend = need_of(learner), actor.layout.backend
    for name, backends in OF.items():
        default = config.Learner.model_fields[name].default
        if getattr(learner, name) != default and backend not in backends:
            raise ConfigError(f"[learner] {name}: backend {backend} has no such option, only {', '.join(backends)}")
    if need.fewest > shards:
        raise ConfigError(
            f"[learner] backend {learner.backend} trains with {need.fewest} learners, and [topics] shards = {shards} "
            f"lets {shards} share a policy: choose a smaller layout, or a new namespace with more shards"
        )
    if learner.optimizer_offload and (learner.precision != "bf16" or max(need.fewest, learner.learners) > 1):
        raise ConfigError(
            "[learner] optimizer_offload: main memory keeps what the bf16 copies of one learner are made of: set "
            'precision = "bf16" and learners = 1, or backend = "deepspeed" with zero_offload for several'
        )
    if learner.lora.rank and need.fewest > 1:
        raise ConfigError(
            "[learner] lora: an adapter trains with data parallelism alone and all roles on the same ranks; "
            f"backend = {learner.backend!r} asks for more"
        )
    return [actor, *serving_places]


def suits(places: Sequence[RolePlace], roles: Sequence[str], algorithm: str) -> None:
    """ConfigError where somebody would play a role that the algorithm, which has these, does not."""
    for role in (role for place in places for role in place.roles):
        if role not in roles:
            raise ConfigError(
                f"[learner] backend: it names a {role}, and {algorithm} as configured has none, only "
                f"{', '.join(roles)}: leave it out"
            )


def make(learner: config.Learner, places: Sequence[RolePlace], adam: Adam) -> Backend:
    """An unformed backend for `places`, with the options of `learner`."""
    layout = places[0].layout
    if layout.backend == DEEPSPEED:
        from millrace.trainers.backends.deepspeed.backend import DeepSpeedBackend

        return DeepSpeedBackend(
            adam,
            parallel=layout,
            stage=learner.zero_stage,
            offload=learner.zero_offload,
            bf16=learner.precision == "bf16",
            deterministic=learner.repeatable,
        )
    from millrace.trainers.backends.factory import make_backend

    if layout.backend != TORCH:
        return make_backend(layout, adam, deterministic=learner.repeatable)
    from millrace.trainers.backends.torch.compute import Compute

    return make_backend(
        format_places(places),
        adam,
        offload=learner.offload,
        compute=Compute(
            learner.precision == "bf16",
            learner.activation_checkpointing,
            fusion=learner.fusion,
            optimizer_offload=learner.optimizer_offload,
        ),
        deterministic=learner.repeatable,
        reshard=learner.reshard,
        schedule=learner.pipeline_schedule,
    )


def learner_count(learner: config.Learner) -> int:
    """Learners that `millrace up` starts: as many as asked for, and no fewer than the layout as written has ranks."""
    return max(learner.learners, sum(place.layout.world for place in role_places(learner))) if learner.learners else 0


def shortage_text(learner: config.Learner, here: int) -> str:
    """What so many learners wait for, who are too few."""
    need, (actor, *serving_places) = need_of(learner), role_places(learner)
    missing = need.fewest - here
    more = "another" if missing == 1 else f"{missing} more"
    roles = f" ({ACTOR} {actor.layout.unit}, {_serving(serving_places)})" if serving_places else ""
    return f"{_learners(here)} here, {learner.backend} trains with {need.fewest}{roles}: start {more}"


def spare_text(learner: config.Learner, here: int) -> str:
    """Why one of so many learners waits while others train."""
    actor, *serving_places = role_places(learner)
    beside = f" beside {_serving(serving_places)}" if serving_places else ""
    many = f"multiples of {actor.layout.unit}{beside}"
    return f"{_learners(here)} here, {learner.backend} trains with {many}: this one waits as a spare"


def _serving(places: Sequence[RolePlace]) -> str:
    return ", ".join(f"{'|'.join(place.roles)} {place.layout.world}" for place in places)


def _learners(count: int) -> str:
    return f"{count} learner" if count == 1 else f"{count} learners"
