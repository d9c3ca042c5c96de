"""Algorithms by name."""

from __future__ import annotations

import difflib
from dataclasses import fields
from typing import Any

from trainers.algorithms.base import Algorithm
from trainers.algorithms.grpo import Grpo
from trainers.algorithms.sft import Sft
from trainers.errors import BadConfiguration

ALGORITHMS: dict[str, type[Grpo] | type[Sft]] = {Grpo.name: Grpo, Sft.name: Sft}


def algorithm(name: str, **knobs: Any) -> Algorithm:
    """The algorithm called `name`, its preset overridden by `knobs`. Unknown names are refused with the nearest valid
    one."""
    if name not in ALGORITHMS:
        raise BadConfiguration(f"no algorithm {name!r}{_nearest(name, ALGORITHMS)}")
    kind = ALGORITHMS[name]
    known = [field.name for field in fields(kind)]
    for knob in knobs:
        if knob not in known:
            raise BadConfiguration(f"{name} has no knob {knob!r}{_nearest(knob, known)}")
    return kind(**knobs)


def _nearest(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; choose one of {', '.join(sorted(known))}"
