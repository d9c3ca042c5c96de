"""Verifiers in processes of their own, with timeouts.

Invariants: every judgement ends, with a verdict or with a labelled failure (`timeout`, `crash`, or `error: Name`); a
verifier that dies or hangs costs its own verdict only; a failure never carries the text of an exception, which may
quote the episode."""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import TimeoutError as FutureTimeout
from functools import cache
from multiprocessing import get_context
from typing import Any, NamedTuple

import orjson
from pebble import ProcessExpired, ProcessPool

from millrace.schemas.json_values import JsonObject
from millrace.schemas.signals import Signal
from millrace.streams.reward.verifiers import Verifier, load, normal

LIFE = 10_000
"""verdicts after which a process is replaced, should a verifier leak"""


class Verdict(NamedTuple):
    """What a verifier said, or why it said nothing."""

    value: float | None
    components: dict[str, float]
    label: str | None
    critique: str | None
    failure: str | None
    confidence: float | None = None
    """of whoever judges in the verdict, 0 to 1"""
    signal: Signal | None = None
    """what kind of evidence it is"""


class Pool:
    """Judges with one verifier. `timeout_s` bounds each verdict."""

    def __init__(self, verifier: str, *, workers: int = 1, timeout_s: float = 10.0) -> None:
        """Raises RewardError when there is no such verifier."""
        load(verifier)
        self._verifier = verifier
        self._timeout_s = timeout_s
        self._pool: Any = ProcessPool(
            max_workers=workers,
            max_tasks=LIFE,
            initializer=begin,
            initargs=(verifier, list(sys.path)),
            context=get_context("spawn"),
        )

    @property
    def version(self) -> str:
        """Names the verifier."""
        return self._verifier

    async def judge(self, task: str, output: str, episode: JsonObject) -> Verdict:
        """The verdict on an output. `task` is JSON."""
        future = self._pool.schedule(run, args=(self._verifier, task, output, episode), timeout=self._timeout_s)
        try:
            verdict, failure = await asyncio.wrap_future(future)
        except FutureTimeout:
            return _failure("timeout")
        except ProcessExpired:
            return _failure("crash")
        return _failure(failure) if failure else Verdict(**verdict, failure=None)

    def close(self) -> None:
        """End the processes, whatever they do."""
        self._pool.stop()
        self._pool.join()


def begin(verifier: str, path: list[str]) -> None:
    """A process of the pool starts: it finds the modules that its parent finds."""
    sys.path[:] = path
    _load(verifier)


def run(verifier: str, task: str, output: str, episode: JsonObject) -> tuple[JsonObject, str]:
    """(verdict, failure or "") in a process of the pool."""
    try:
        return normal(_load(verifier)(orjson.loads(task), output, episode)), ""
    except Exception as error:  # a verifier is the user's code: whatever it raises is a labelled failure
        return {}, f"error: {type(error).__name__}"


@cache
def _load(verifier: str) -> Verifier:
    return load(verifier)


def _failure(failure: str) -> Verdict:
    return Verdict(None, {}, None, None, failure)
