"""The algorithms that learn from history, and what each of them reads.

Samples of history come from other weights than those that train, so what follows the policy gradient weighs each token
by its ratio to the policy that sampled it, truncated at 2 (TIS), unless the method has a rule of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from millrace.consumers.replay.branch.items import Shape, best, groups, pairs, singles
from millrace.trainers.algorithms.presets import TIS

TRUNCATED: Mapping[str, Any] = {"decoupled": True, "rejection": TIS}


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
    "grpo": Method("compares rewards within groups", "grpo", groups, ratios=True, knobs=TRUNCATED),
    "rloo": Method("compares each reward with the others of its group", "rloo", groups, ratios=True, knobs=TRUNCATED),
    "decoupled": Method("GRPO, clipped around the recomputed policy", "decoupled", groups, ratios=True),
    "tis": Method("truncated importance sampling", "tis", groups, ratios=True),
    "icepop": Method("leaves out tokens whose ratio is far off", "icepop", groups, ratios=True),
    "m2po": Method("leaves out the tokens that are furthest from the policy", "m2po", groups, ratios=True),
    "dpo": Method("prefers the better one of each pair", "dpo", pairs),
    "ipo": Method("the same with a bounded gap", "ipo", pairs),
    "distill-forward": Method("covers what a teacher may say", "distill-forward", singles),
    "distill-reverse": Method("seeks what a teacher would say", "distill-reverse", singles),
}
"""by the name that `--algorithm` takes"""
