"""Ranks without processes: what each would do, their sums played one after the other until every answer is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from millrace.trainers.algorithms.normalisation import Reduce

T = TypeVar("T")


class _Unanswered(Exception):
    """A rank waits for the others."""


def together(ranks: Sequence[Callable[[Reduce], T]]) -> list[T]:
    """What the ranks return. Asserts that each adds up equally often; a rank is run again from its start for each sum,
    so it must be pure."""
    answers: list[list[float]] = []
    while True:
        asked: list[list[float]] = []
        done = [_run(rank, answers, asked) for rank in ranks]
        if not asked:
            return [results[0] for results in done]
        assert len(asked) == len(ranks), "every rank adds up equally often"
        answers.append([float(sum(column)) for column in zip(*asked, strict=True)])


def _run(rank: Callable[[Reduce], T], answers: list[list[float]], asked: list[list[float]]) -> list[T]:
    known = iter(answers)

    def reduce(values: Sequence[float]) -> list[float]:
        answer = next(known, None)
        if answer is None:
            asked.append(list(values))
            raise _Unanswered
        return answer

    try:
        return [rank(reduce)]
    except _Unanswered:
        return []
