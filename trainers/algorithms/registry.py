"""Algorithms by name, with any of their knobs overridden."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from millrace.trainers.algorithms.awr import Awr
from millrace.trainers.algorithms.base import Algorithm
from millrace.trainers.algorithms.distill import Distill
from millrace.trainers.algorithms.dpo import Dpo
from millrace.trainers.algorithms.knobs import Knobs
from millrace.trainers.algorithms.kto import Kto
from millrace.trainers.algorithms.names import ABSENT, NEW_NAMES, check_switches, translate
from millrace.trainers.algorithms.normalisation import Norm
from millrace.trainers.algorithms.orpo import Orpo
from millrace.trainers.algorithms.policy import PolicyGradient
from millrace.trainers.algorithms.presets import ALIASES, PRESETS
from millrace.trainers.algorithms.repair import Rejection
from millrace.trainers.algorithms.reward_model import RewardModel
from millrace.trainers.algorithms.sft import Sft
from millrace.trainers.algorithms.simpo import Simpo
from millrace.trainers.errors import BadConfiguration

Kind: TypeAlias = (
    type[Sft] | type[Awr] | type[Dpo] | type[Simpo] | type[Orpo] | type[Kto] | type[RewardModel] | type[Distill]
)


@dataclass(frozen=True)
class OtherAlgorithm:
    """kind: what makes it; about: one sentence on what it is; knobs: with what."""

    kind: Kind
    about: str
    knobs: Mapping[str, str]


OTHERS: dict[str, OtherAlgorithm] = {
    "sft": OtherAlgorithm(Sft, "Next-token cross-entropy on the trainable tokens.", {}),
    "awr": OtherAlgorithm(Awr, "Imitates each reply by how much better it was than the others of its group.", {}),
    "dpo": OtherAlgorithm(Dpo, "Raises the chosen reply over the rejected one, against a frozen reference.", {}),
    "ipo": OtherAlgorithm(Dpo, "The same as DPO with a margin to reach instead of one to widen.", {"loss_type": "ipo"}),
    "simpo": OtherAlgorithm(Simpo, "Prefers by the mean log-probability of a reply, without a reference.", {}),
    "orpo": OtherAlgorithm(Orpo, "Imitates the chosen reply and lowers the odds of the rejected one.", {}),
    "kto": OtherAlgorithm(Kto, "Raises good replies and lowers bad ones, each by itself, against a reference.", {}),
    "reward-model": OtherAlgorithm(RewardModel, "A scalar head that scores the chosen reply higher.", {}),
    "distill-forward": OtherAlgorithm(Distill, "Covers all that the teacher may say.", {"direction": "forward"}),
    "distill-reverse": OtherAlgorithm(Distill, "Seeks what the teacher would say most.", {"direction": "reverse"}),
}


NULLABLE = {"clip_high", "dual_clip", "m2_threshold", "value_clip", "value_huber"}
"""Numbers that may be left out; configurations that have no null say "none"."""


def names() -> list[str]:
    """Every algorithm that `algorithm` makes."""
    return [*PRESETS, *OTHERS]


def algorithm(name: str, **knobs: object) -> Algorithm:
    """The algorithm called `name`, its preset overridden by `knobs`. Unknown names are refused with the nearest valid
    one."""
    canonical = ALIASES.get(name.lower(), name.lower())
    if canonical in PRESETS:
        return policy(canonical, **knobs)
    if canonical in ABSENT:
        raise BadConfiguration(f"no algorithm {name!r}: {ABSENT[canonical]}")
    if canonical not in OTHERS:
        raise BadConfiguration(f"no algorithm {name!r}{_nearest(name, [*names(), *ALIASES])}")
    entry = OTHERS[canonical]
    defaults = {field.name: field.default for field in fields(entry.kind)}
    _check_names(canonical, knobs, defaults)
    return entry.kind(
        **{**entry.knobs, **{knob: _check_value(knob, value, defaults[knob]) for knob, value in knobs.items()}}
    )


def policy(name: str, **knobs: object) -> PolicyGradient:
    """One of the policy-gradient family."""
    options = {field.name for field in fields(Knobs)}
    overrides = translate(knobs)
    _check_names(name, overrides, options | NEW_NAMES.keys())
    values = {**PRESETS[name].knobs, **{knob: _value(knob, v) for knob, v in overrides.items()}}
    check_switches(name, knobs, values)
    return PolicyGradient(Knobs(**values), name)


def _check_names(name: str, knobs: Mapping[str, object], choices: Iterable[str]) -> None:
    options = list(choices)
    for knob in knobs:
        if knob not in options:
            raise BadConfiguration(f"{name} has no knob {knob!r}{_nearest(knob, options)}")


def _value(knob: str, value: object) -> Any:
    if knob.endswith("_norm"):
        return Norm.parse(value)
    if knob == "rejection":
        return Rejection.parse(value)
    if knob in NULLABLE and value in ("none", ""):
        return None
    default = Knobs.__dataclass_fields__[knob].default
    if knob in NULLABLE:
        return value if value is None else _check_value(knob, value, 1.0)
    return _check_value(knob, value, default)


def _check_value(knob: str, value: object, default: object) -> Any:
    match default:
        case bool():
            right = isinstance(value, bool)
        case int():
            right = isinstance(value, int) and not isinstance(value, bool)
        case float():
            right = isinstance(value, int | float) and not isinstance(value, bool)
        case _:
            right = isinstance(value, str)
    if not right:
        raise BadConfiguration(f"{knob} = {value!r} must be of the kind of its default, {default!r}")
    return value


def _nearest(word: str, words: Iterable[str]) -> str:
    options = sorted(words)
    close = difflib.get_close_matches(word, options, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; choose one of {', '.join(options)}"
