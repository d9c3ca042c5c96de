"""Verifiers: plain functions that judge an output.

    def verify(task: dict, output: str, episode: dict) -> float | dict

`task` is the task as its author wrote it, answers included; `output` what the agent returned, else the last reply's
text ("" when there is none); `episode` has trajectory, group, task_id, status, stop_condition, steps, policy, attempt.
A dict may hold `value` (number), `components` (numbers by name), `label`, `critique`, `confidence` (0 to 1) and
`signal`.

Invariant: a verdict is a finite number with its parts, or an error; nothing else becomes a reward."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, SupportsFloat, get_args

from millrace.infra.errors import RewardError
from millrace.infra.process.loaders import load_function
from millrace.schemas import bounds
from millrace.schemas.json_values import JsonObject
from millrace.schemas.signals import Signal

PARTS = frozenset({"value", "components", "label", "critique", "confidence", "signal"})
_NUMBER = r"\$?(-?\d+(?:[./]\d+)?)\$?"
_HEDGE = re.compile(
    rf"(?<![\w.]){_NUMBER}[ ,]{{1,3}}"
    rf"(?:\b(?:or|maybe|perhaps|possibly)\b[ ,]{{1,3}}){{1,2}}{_NUMBER}\s{{0,3}}[.!?]?\s{{0,3}}\Z"
)
Verifier = Callable[[JsonObject, str, JsonObject], float | Mapping[str, Any]]


def exact(task: Mapping[str, Any], output: str, episode: JsonObject) -> float:
    """1 when the output is the task's `answer` (or one of its `answers`), spaces at the ends aside."""
    answers = task["answers"] if "answers" in task else [task["answer"]]
    return float(any(output.strip() == str(answer).strip() for answer in answers))


def mathematics(task: JsonObject, output: str, episode: JsonObject) -> float:
    """1 when the output's last mathematical expression equals the task's `answer` (math-verify). An output that ends
    with a choice between two numbers answers nothing."""
    from math_verify import parse, verify

    # Its own timeouts use signals, which only main threads have; the pool ends what takes too long.
    gold = parse(f"${task['answer']}$", parsing_timeout=None)
    if (hedge := _HEDGE.search(output)) is not None:
        first, second = (parse(f"${number}$", parsing_timeout=None) for number in hedge.groups())
        if not verify(first, second, timeout_seconds=None):
            return 0.0
    return float(bool(verify(gold, parse(output, parsing_timeout=None), timeout_seconds=None)))


BUILT_IN: Mapping[str, Verifier] = {"exact": exact, "math": mathematics}


def load(name: str) -> Verifier:
    """The verifier called `exact`, `math` or `module:function`. Raises RewardError when there is none."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    verifier: Verifier = load_function(name, "verifier", "my_rewards.sort:check, or one of exact and math", RewardError)
    return verifier


def normal(answer: object) -> dict[str, Any]:
    """A verdict with value, components, label, critique, confidence and signal. Raises ValueError for what is none."""
    fields: Mapping[str, Any] = answer if isinstance(answer, Mapping) else {"value": answer}
    unknown = set(fields) - PARTS
    if unknown:
        raise ValueError(f"a verdict has no {', '.join(sorted(map(str, unknown)))}")
    parts = dict(fields.get("components") or {})
    if len(parts) > bounds.NAMES:
        raise ValueError(f"a verdict has at most {bounds.NAMES} components")
    return {
        "value": _number(fields.get("value")),
        "components": {_name(name): _number(part) for name, part in parts.items()},
        "label": _text(fields.get("label")),
        "critique": _text(fields.get("critique")),
        "confidence": _confidence(fields.get("confidence")),
        "signal": _signal(fields.get("signal")),
    }


def _confidence(value: object) -> float | None:
    if value is None:
        return None
    share = _number(value)
    if not 0 <= share <= 1:
        raise ValueError("a verdict's confidence is from 0 to 1")
    return share


def _signal(value: object) -> str | None:
    if value is not None and value not in get_args(Signal):
        raise ValueError(f"a verdict's signal is one of {', '.join(get_args(Signal))}")
    return None if value is None else str(value)


def _number(value: object) -> float:
    if not isinstance(value, SupportsFloat):
        raise ValueError("a verdict's value must be a number")
    number = float(value)
    if not math.isfinite(number) or abs(number) > bounds.REWARD:
        raise ValueError(f"a verdict's value must be finite, and at most {bounds.REWARD:,.0f}")
    return number


def _text(value: object) -> str | None:
    """Words as they can be stored: half a surrogate pair becomes a question mark."""
    return None if value is None else str(value).encode("utf-8", "replace").decode()


def _name(value: object) -> str:
    name = _text(value) or ""
    if len(name.encode()) > bounds.NAME_BYTES:
        raise ValueError(f"a component's name has at most {bounds.NAME_BYTES} bytes")
    return name
