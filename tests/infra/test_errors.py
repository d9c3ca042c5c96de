"""The drawn trees of errors show every error there is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.infra import errors as ours
from millrace.schemas import errors as words
from millrace.trainers import errors as learning
from tests.support.house import ROOMS

ROOT = Path(ours.__file__).parents[1]


def defined(root: str) -> Iterator[tuple[str, str]]:
    """(name, name of what it extends) of each public error below `root`, wherever it is defined."""
    classes = [
        (node.name, base.id)
        for folder in ROOMS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        for base in node.bases
        if isinstance(base, ast.Name)
    ]
    below, found = {root}, True
    while found:
        found = {name for name, base in classes if base in below} - below
        below |= found
    return ((name, base) for name, base in classes if base in below and not name.startswith("_"))


def drawn(text: str) -> Iterator[tuple[str, str]]:
    """(name, name of what stands above it) of each line of a tree."""
    above: list[str] = []
    indent = 0
    for line in text.splitlines():
        branch = re.match(r"((?:[│ ] {3})*)(?:├──|└──) (\w+)", line[indent:])
        root = re.fullmatch(r"( *)(\w+Error)", line)
        if root:
            indent, above = len(root[1]), [root[2]]
        elif branch and above:
            depth = len(branch[1]) // 4 + 1
            above = [*above[:depth], branch[2]]
            yield branch[2], above[depth - 1]


@pytest.mark.parametrize(
    ("module", "root"), [(ours, "MillraceError"), (words, "SchemaError"), (learning, "TrainerError")]
)
def test_the_tree_is_whole(module: object, root: str) -> None:
    assert sorted(drawn(module.__doc__ or "")) == sorted(defined(root))
