"""The points of the code at which a process may be killed (`millrace.infra.faults`), each a literal in the source."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from tests.support.house import ROOMS, modules, tree_of


def fault_points(*rooms: str) -> list[str]:
    """The names of those in these rooms, of all where none is named; sorted."""
    return sorted(set().union(*(_points_of(room) for room in rooms or ROOMS)))


@cache
def _points_of(room: str) -> frozenset[str]:
    # To parse all the source takes seconds: most of it never names that module.
    return frozenset().union(*(_points_in(path) for path in modules(room) if "faults" in path.read_text()))


def _points_in(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(tree_of(path)):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="faults"), attr="point"), args=[ast.Constant(value=str(name))]
            ):
                names.add(name)
    return names
