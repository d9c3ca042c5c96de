"""What ranks say to each other in numbers, over a backend that does no more than find the largest."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from typing import Any

from millrace.consumers.learner.group import rank_numbers


def together(what: Callable[[Any], Any], *ranks: dict[str, Any]) -> list[Any]:
    """What each rank gets of `what` when all call it."""
    world = len(ranks)
    barrier, said = Barrier(world), [[0.0]] * world

    def largest(rank: int, values: list[float]) -> list[float]:
        said[rank] = list(values)
        barrier.wait(10)
        return [max(column) for column in zip(*said, strict=True)]

    backends = [
        SimpleNamespace(rank=rank, world=world, max=lambda values, rank=rank: largest(rank, values), **about)
        for rank, about in enumerate(ranks)
    ]
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(what, backends))


def test_flags_are_counted_over_all_ranks() -> None:
    flags = [[True, False, 1], [True, False, 0], [False, False, 7]]
    found = together(lambda backend: rank_numbers.count(backend, flags[backend.rank]), {}, {}, {})
    assert found == [[2, 0, 2]] * 3


def test_everybody_learns_every_cell_and_who_is_in_none() -> None:
    ranks = [{"data_rank": cell, "acts": acts} for cell, acts in ((0, True), (1, True), (0, True), (0, False))]
    assert together(rank_numbers.cells, *ranks) == [[0, 1, 0, rank_numbers.SERVES]] * 4


def test_the_worst_code_holds_for_all() -> None:
    codes = [[0, 3, 0], [2, 1, 0]]
    assert together(lambda backend: rank_numbers.worst(backend, codes[backend.rank]), {}, {}) == [[2, 3, 0]] * 2


def test_alone_there_is_nobody_else() -> None:
    assert together(lambda backend: rank_numbers.count(backend, [True, False]), {}) == [[1, 0]]
