"""Verifiers: plain functions `(task, output) -> float | dict`, built in or named as module:function.

A dict holds `value` and, when wanted, `label`, `critique` and named float `components`. Raising means that the verifier
failed, which is recorded as such and is never a zero. They run in worker processes: import what is heavy inside.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from infra.errors import RewardError

Task = Mapping[str, Any]
Verifier = Callable[[Task, str], "float | Mapping[str, Any]"]


def exact(task: Task, output: str) -> float:
    """1.0 when the output is the task's `answer`, blanks around both ignored."""
    return float(output.strip() == str(task["answer"]).strip())


def math(task: Task, output: str) -> float:
    """1.0 when the output equals the task's `answer` as mathematics (math-verify: LaTeX and plain expressions)."""
    from math_verify import parse, verify

    # Its own timeouts need the main thread's signals; the pool's timeout stands in for them.
    wanted = parse(str(task["answer"]), parsing_timeout=None)
    return float(verify(wanted, parse(output, parsing_timeout=None), timeout_seconds=None))


BUILT_IN: Mapping[str, Verifier] = {"exact": exact, "math": math}


@cache
def load(name: str) -> Verifier:
    """The verifier of this name. Raises RewardError when there is none."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise RewardError(f"no verifier is called {name!r}: use {', '.join(BUILT_IN)} or module:function")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise RewardError(f"the verifier {name} cannot be loaded: {error}") from error
    if not callable(found):
        raise RewardError(f"the verifier {name} is no function")
    verifier: Verifier = found
    return verifier
