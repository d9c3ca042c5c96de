"""The rooms of the product: the folders of the repository that are packages, as files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = tuple(sorted(path.parent.name for path in ROOT.glob("*/__init__.py")))


def modules(*rooms: str) -> Iterator[Path]:
    """Every file of Python in these rooms, of all where none is named."""
    for room in rooms or ROOMS:
        yield from sorted((ROOT / room).rglob("*.py"))
