"""The kinds of topic that a policy's history has: their names, and which records lie in each.

Invariant: a kind is the part of a topic's name that is the same for every policy, so `ledger` stands for
`<namespace>.<policy>.ledger` and `turns.dispatch` for `<namespace>.turns.<policy>.dispatch`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic

from millrace.infra.log.topics import full_name, logical_name, stages_of, turns_of
from millrace.schemas.records import (
    Completion,
    DeadLetter,
    Decision,
    Evaluation,
    Event,
    Grant,
    LedgerEntry,
    Principal,
    Prompt,
    Resolution,
    Trajectory,
    Turn,
    WeightVersion,
    WorkerStatus,
)

if TYPE_CHECKING:  # the library of Python 3.11 has no defaults of type variables
    from typing_extensions import TypeVar

    R = TypeVar("R", default=Any)
else:
    from typing import TypeVar

    R = TypeVar("R")


class Kind(str, Generic[R]):
    """The name of a kind of topic, which also tells type checkers what its records are."""


RAW = Kind[Event]("raw")
EVENTS = Kind[Event]("events")
"""also holds seal's Progress: ask `Row.name`"""
DEAD_LETTERS = Kind[DeadLetter]("dead-letters")
PROMPTS = Kind[Prompt]("prompts")
GRANTS = Kind[Grant]("grants")
TRAJECTORIES = Kind[Trajectory]("trajectories")
EVALUATIONS = Kind[Trajectory]("evaluations")
COMPLETIONS = Kind[Completion]("completions")
RESOLUTIONS = Kind[Resolution]("resolutions")
WEIGHTS = Kind[WeightVersion]("weights")
LEDGER = Kind[LedgerEntry]("ledger")
SCORES = Kind[Evaluation]("scores")
WORKERS = Kind[WorkerStatus]("workers")
DECISIONS = Kind[Decision]("decisions")
PRINCIPALS = Kind[Principal]("principals")
TURNS = tuple(Kind[Turn](turns_of(role)) for role in stages_of(""))

HOLDS: Mapping[str, tuple[str, ...]] = {
    RAW: ("Event",),
    EVENTS: ("Event", "Progress"),
    DEAD_LETTERS: ("DeadLetter",),
    PROMPTS: ("Prompt",),
    GRANTS: ("Grant",),
    TRAJECTORIES: ("Trajectory",),
    EVALUATIONS: ("Trajectory",),
    COMPLETIONS: ("Completion",),
    RESOLUTIONS: ("Resolution",),
    WEIGHTS: ("WeightVersion",),
    LEDGER: ("LedgerEntry",),
    SCORES: ("Evaluation",),
    WORKERS: ("WorkerStatus",),
    DECISIONS: ("Decision",),
    PRINCIPALS: ("Principal",),
    **dict.fromkeys(TURNS, ("Turn",)),
}
"""names of the records that each kind of topic holds"""

SHARED_KINDS = frozenset({RAW, EVENTS, DEAD_LETTERS, WORKERS, DECISIONS, PRINCIPALS})
"""kinds of which every policy of a namespace uses the same topic"""


def topics_of(namespace: str, policy: str) -> dict[str, str]:
    """Full names of the topics by kind."""
    turns = {turns_of(role): turns_of(stage) for role, stage in stages_of(policy).items()}
    return {
        kind: full_name(namespace, turns.get(kind) or (kind if kind in SHARED_KINDS else f"{policy}.{kind}"))
        for kind in HOLDS
    }


def deployment_of(weights: str) -> tuple[str, str]:
    """The namespace and the policy of a topic of weights, by its full name."""
    return weights.partition(".")[0], logical_name(weights).removesuffix(f".{WEIGHTS}")
