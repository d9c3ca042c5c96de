"""Verifiers: plain functions that judge an output.

    def verify(task: dict, output: str, episode: dict) -> float | dict

`task` is the task as its author wrote it, answers included; `output` what the agent returned, else the last reply's
text ("" when there is none); `episode` has trajectory, group, task_id, status, stop_condition, steps, policy, attempt.
A dict may hold `value` (number), `components` (numbers by name), `label` and `critique`.

Invariant: a verdict is a finite number with its parts, or an error; nothing else becomes a reward."""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, SupportsFloat

from infra.errors import RewardError

Verifier = Callable[[dict[str, Any], str, dict[str, Any]], float | Mapping[str, Any]]


def exact(task: dict[str, Any], output: str, episode: dict[str, Any]) -> float:
    """1 when the output is the task's `answer` (or one of its `answers`), spaces at the ends aside."""
    wanted = task["answers"] if "answers" in task else [task["answer"]]
    return float(any(output.strip() == str(answer).strip() for answer in wanted))


def mathematics(task: dict[str, Any], output: str, episode: dict[str, Any]) -> float:
    """1 when the output's last mathematical expression equals the task's `answer` (math-verify)."""
    from math_verify import parse, verify

    # Its own timeouts use signals, which only main threads have; the pool ends what takes too long.
    gold = parse(f"${task['answer']}$", parsing_timeout=None)
    return float(bool(verify(gold, parse(output, parsing_timeout=None), timeout_seconds=None)))


OURS: Mapping[str, Verifier] = {"exact": exact, "math": mathematics}


def load(name: str) -> Verifier:
    """The verifier called `exact`, `math` or `module:function`. Raises RewardError when there is none."""
    if name in OURS:
        return OURS[name]
    module, _, function = name.partition(":")
    if not module or not function:
        raise RewardError(f"verifier {name!r} must be exact, math, or module:function such as my_rewards.sort:check")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Verifier = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise RewardError(f"verifier {name!r} cannot be loaded: {error}") from error
    if not callable(found):
        raise RewardError(f"verifier {name!r} is not a function")
    return found


def normal(answer: object) -> dict[str, Any]:
    """A verdict with value, components, label and critique. Raises ValueError for what is none."""
    given: Mapping[str, Any] = answer if isinstance(answer, Mapping) else {"value": answer}
    unknown = set(given) - {"value", "components", "label", "critique"}
    if unknown:
        raise ValueError(f"a verdict has no {', '.join(sorted(map(str, unknown)))}")
    return {
        "value": _number(given.get("value")),
        "components": {str(name): _number(part) for name, part in dict(given.get("components") or {}).items()},
        "label": _text(given.get("label")),
        "critique": _text(given.get("critique")),
    }


def _number(value: object) -> float:
    if not isinstance(value, SupportsFloat):
        raise ValueError("a verdict's value must be a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("a verdict's value must be finite")
    return number


def _text(value: object) -> str | None:
    return None if value is None else str(value)
