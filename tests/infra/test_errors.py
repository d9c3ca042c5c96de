"""The drawn tree of errors shows every error there is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from millrace.infra import errors
from tests.support.house import ROOMS

ROOT = Path(errors.__file__).parents[1]


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


def test_the_tree_is_whole() -> None:
    assert sorted(drawn(errors.__doc__ or "")) == sorted(defined("MillraceError"))


def test_no_other_module_draws_a_tree_or_has_an_error_outside_it() -> None:
    roots = set()
    for folder in ROOMS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            tree = ast.parse(path.read_text())
            assert path == Path(errors.__file__) or not list(drawn(ast.get_docstring(tree) or "")), path
            roots |= {
                node.name
                for node in ast.walk(tree)
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
                if any(isinstance(base, ast.Name) and base.id == "Exception" for base in node.bases)
            }
    assert {name for name in roots if name.endswith("Error")} == {"MillraceError"}
