"""What the ranks of a formed group say to each other in numbers: flags, cells, codes.

Invariant: all ranks of the world call each function together, in the same order, those that serve a role too.
"""

from __future__ import annotations

from collections.abc import Sequence

from millrace.trainers.backends.base import Backend

SERVES = -1
"""in the place of a cell, of a rank that serves a role and trains no share"""


def by_rank(backend: Backend, numbers: Sequence[int]) -> list[list[int]]:
    """What each rank says: as many numbers as the others, none below 0."""
    row = [0.0] * (backend.world * len(numbers))
    first = backend.rank * len(numbers)
    row[first : first + len(numbers)] = numbers
    answers = iter(backend.max(row))
    return [[int(next(answers)) for _ in numbers] for _ in range(backend.world)]


def count(backend: Backend, flags: Sequence[int]) -> list[int]:
    """How many ranks raised each flag; every rank learns it."""
    rows = by_rank(backend, [int(bool(flag)) for flag in flags])
    return [sum(column) for column in zip(*rows, strict=True)]


def cells(backend: Backend) -> list[int]:
    """The cell of each rank, or SERVES."""
    rows = by_rank(backend, [backend.data_rank, not backend.acts])
    return [SERVES if serves else cell for cell, serves in rows]


def worst(backend: Backend, codes: Sequence[int]) -> list[int]:
    """The largest of each code over the ranks."""
    return [int(code) for code in backend.max(codes)]
