"""Runs verifiers in worker processes: a timeout kills the worker, a crash loses only its own verdict.

Invariant: every call ends in a Verdict; what goes wrong is a labelled failure without a value.
"""

from __future__ import annotations

import asyncio
import json
import math
import multiprocessing
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pebble import ProcessExpired, ProcessPool

from streams.reward.verifiers import load


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verifier said. `failure` is set exactly when `value` is None: timeout, crash or error: TEXT."""

    value: float | None
    failure: str | None = None
    label: str | None = None
    critique: str | None = None
    components: Mapping[str, float] = field(default_factory=dict)


class VerifierPool:
    """`workers` processes that run the verifier `name` for at most `timeout_s` a call."""

    def __init__(self, name: str, *, workers: int, timeout_s: float) -> None:
        load(name)  # a verifier that is not there is said at the start, not at the first episode
        self._name = name
        self._timeout_s = timeout_s
        context = multiprocessing.get_context("spawn")
        self._pool: Any = ProcessPool(workers, initializer=_begin, initargs=(name, list(sys.path)), context=context)

    async def judge(self, task: str, output: str) -> Verdict:
        """The verdict on an output for a task (JSON)."""
        future = self._pool.schedule(_judge, args=[self._name, task, output], timeout=self._timeout_s)
        try:
            return await asyncio.wrap_future(future)
        except TimeoutError:
            return Verdict(None, "timeout")
        except ProcessExpired:
            return Verdict(None, "crash")

    def close(self) -> None:
        """End the workers, verdicts in progress included."""
        self._pool.stop()
        self._pool.join()


def _begin(name: str, path: Sequence[str]) -> None:
    sys.path[:] = path
    load(name)


def _judge(name: str, task: str, output: str) -> Verdict:
    """In a worker. A verifier's own exceptions are its verdict's failure: user code may raise anything."""
    try:
        said = load(name)(json.loads(task), output)
        return _verdict(said)
    except Exception as error:
        return Verdict(None, f"error: {type(error).__name__}: {error}"[:500])


def _verdict(said: float | Mapping[str, Any]) -> Verdict:
    found: Mapping[str, Any] = said if isinstance(said, Mapping) else {"value": said}
    value = float(found["value"])
    if not math.isfinite(value):
        return Verdict(None, f"error: the verifier said {value}")
    components = {str(name): float(part) for name, part in dict(found.get("components") or {}).items()}
    return Verdict(value, None, found.get("label"), found.get("critique"), components)
