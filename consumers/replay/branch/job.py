"""What a branch is: the algorithms that learn from history, the options that must be equal for a branch to go on, and
those that need not.

Samples of history come from other weights than those that train, so what follows the policy gradient weighs each token
by its ratio to the policy that sampled it, truncated at 2 (TIS), unless the method has a rule of its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from millrace.consumers.learner.group.identity import Identity, code_hash, cpu_hash, libraries
from millrace.consumers.replay.branch.items import Shape, best, groups, pairs, singles
from millrace.infra.config import Settings, masking
from millrace.infra.errors import BranchError
from millrace.infra.log.topics import NAME
from millrace.infra.process import cuda
from millrace.trainers.algorithms.base import Algorithm
from millrace.trainers.algorithms.presets import TIS
from millrace.trainers.algorithms.registry import algorithm
from millrace.trainers.backends.layout import REFERENCE, TEACHER, TORCH
from millrace.trainers.schedule import Decay
from millrace.trainers.weights import checkpoint
from millrace.trainers.weights.manifest import base_digest

TIS_KNOBS: Mapping[str, Any] = {"decoupled": True, "rejection": TIS}


@dataclass(frozen=True, slots=True)
class Method:
    """algorithm: its name in the registry; shape: what an item is; ratios: whether it weighs by ratios to the policy
    that sampled, so that the guard looks first; text: whether it learns from text without exact tokens too; knobs: what
    it sets apart from the algorithm's own defaults."""

    about: str
    algorithm: str
    shape: Shape
    ratios: bool = False
    text: bool = False
    knobs: Mapping[str, Any] = field(default_factory=dict)


METHODS: Mapping[str, Method] = {
    "sft": Method("imitates the best of each group, or all where none has a reward", "sft", best, text=True),
    "awr": Method("imitates all of a group, the better ones more", "awr", groups),
    "grpo": Method("compares rewards within groups", "grpo", groups, ratios=True, knobs=TIS_KNOBS),
    "rloo": Method("compares each reward with the others of its group", "rloo", groups, ratios=True, knobs=TIS_KNOBS),
    "decoupled": Method("GRPO, clipped around the recomputed policy", "decoupled", groups, ratios=True),
    "tis": Method("truncated importance sampling", "tis", groups, ratios=True),
    "icepop": Method("leaves out tokens whose ratio is far off", "icepop", groups, ratios=True),
    "m2po": Method("leaves out the tokens that are furthest from the policy", "m2po", groups, ratios=True),
    "dpo": Method("prefers the better one of each pair", "dpo", pairs),
    "ipo": Method("the same with a bounded gap", "ipo", pairs),
    "simpo": Method("prefers without a reference", "simpo", pairs),
    "orpo": Method("imitates the better one of each pair, and prefers it", "orpo", pairs),
    "distill-forward": Method("covers what a teacher may say", "distill-forward", singles),
    "distill-reverse": Method("seeks what a teacher would say", "distill-reverse", singles),
}
"""by the name that `--algorithm` takes"""


@dataclass(frozen=True, slots=True)
class BranchOptions:
    """name: of the new policy; version: of the configured policy, where it begins, None: the newest; method: one of
    METHODS; selection: the text that chose; rewards: SOURCE[/RUBRIC] of a replay, with live: before it of what
    came live, empty: as sealed; batch:
    items of an optimizer batch; save_every: batches of a version; keep: newest versions whose files are kept; anyway:
    the guard refuses nothing; accept_gaps: a history that has lost a part is taken as far as it is there. teacher:
    directory, for distillation. The others as in `trainers.offline.job.Job`."""

    name: str
    version: int | None = None
    method: str = "sft"
    selection: str = "all"
    rewards: str = ""
    knobs: Mapping[str, Any] = field(default_factory=dict)
    teacher: Path | None = None
    epochs: int = 1
    steps: int = 0
    batch: int = 32
    lr: float = 1e-5
    warmup: int = 0
    decay: Decay = "constant"
    floor: float = 0.0
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    seed: int = 0
    budget: int = 16384
    save_every: int = 1
    keep: int = 2
    anyway: bool = False
    accept_gaps: bool = False
    device: str | None = None

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise BranchError(
                f"a branch is a policy, and {self.name!r} is no name of one: letters, digits, '-' and '_'"
            )
        if self.method not in METHODS:
            raise BranchError(f"{self.method} does not learn from history: choose {', '.join(METHODS)}")
        if (self.teacher is None) == self.method.startswith("distill"):
            raise BranchError(
                "distillation, and nothing else, learns from a teacher: name its directory with --teacher"
            )
        if min(self.epochs, self.batch, self.save_every, self.keep) < 1 or self.steps < 0:
            raise BranchError("epochs, batch, save_every and keep must be above 0, steps not below")

    @property
    def kind(self) -> Method:
        return METHODS[self.method]

    def algorithm(self) -> Algorithm:
        """What trains. Raises BadConfiguration for knobs that it does not have."""
        return algorithm(self.kind.algorithm, **{**self.kind.knobs, **self.knobs})

    def models(self, parent: Path) -> dict[str, Path]:
        """Directories of the frozen models, by role; a reference is the version that the branch begins at."""
        roles = self.algorithm().holds
        paths = {REFERENCE: parent, TEACHER: self.teacher}
        return {role: path for role, path in paths.items() if path is not None and role in roles}

    def settings(self, source: Settings) -> Settings:
        """Those of the branch as a policy of its own."""
        return source.model_copy(update={"policy": source.policy.model_copy(update={"name": self.name})})


def about(options: BranchOptions, source: str, version: int, digest: str, models: Mapping[str, str]) -> dict[str, Any]:
    """What must be equal for a branch to go on, as JSON holds it. version and digest: of the weights it begins with;
    models: content by role."""
    loose = {"name", "version", "teacher", "knobs", "keep", "anyway", "accept_gaps", "device"}
    names = [one.name for one in fields(options) if one.name not in loose]
    values = {name: getattr(options, name) for name in names}
    values["knobs"] = {name: repr(value) for name, value in sorted(options.knobs.items())}
    return {**values, "policy": source, "version": version, "digest": digest, "models": dict(models)}


def identity(options: BranchOptions, settings: Settings, description: Mapping[str, Any]) -> Identity:
    """What trains: configuration, code, libraries, models. settings: of the branch."""
    models: dict[str, str] = dict(description["models"])
    learner = {"algorithm": options.kind.algorithm, **{role: f"sha256:{digest}" for role, digest in models.items()}}
    content = {"branch": description, "learner": learner, "policy": settings.policy.name}
    text = masking.in_text(json.dumps(content, sort_keys=True))
    used = libraries([TORCH], gpu=options.device != "cpu" and cuda.usable())
    return Identity(hashlib.sha256(text.encode()).hexdigest(), code_hash(), used, cpu_hash(), text, models)


def contents(models: Mapping[str, Path]) -> dict[str, str]:
    """sha256 hex over configuration and weights of each model, by role."""
    return {role: base_digest(path) for role, path in models.items()}


def loaders(models: Mapping[str, Path]) -> dict[str, Any]:
    """What loads each frozen model, by role."""
    return {role: partial(checkpoint.adopt, path) for role, path in models.items()}
