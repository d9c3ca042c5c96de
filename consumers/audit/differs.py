"""How two decoded records differ, by the names of their fields alone: what they hold is nobody's business here."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from millrace.infra.stages.replay import ANYWHERE

SHOWN = 5


def differing(expected: Any, actual: Any) -> list[str]:
    """Paths of the first few fields that differ: `rewards[0].value`."""
    return list(islice(_paths(expected, actual, ""), SHOWN))


def _paths(expected: Any, actual: Any, at: str) -> Iterator[str]:
    if expected == ANYWHERE:
        return
    if isinstance(expected, dict) and isinstance(actual, dict) and expected.keys() == actual.keys():
        for key, value in expected.items():
            yield from _paths(value, actual[key], f"{at}.{key}" if at else key)
    elif isinstance(expected, list) and isinstance(actual, list) and len(expected) == len(actual):
        for n, (one, other) in enumerate(zip(expected, actual, strict=True)):
            yield from _paths(one, other, f"{at}[{n}]")
    elif expected != actual and (expected == expected or actual == actual):
        yield at or "all of it"
