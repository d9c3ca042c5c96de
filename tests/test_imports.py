"""What tests, benchmarks and examples import from the tree is there, also where only a slow test would see it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("tests", "benchmarks", "examples")


@cache
def names_of(file: Path) -> frozenset[str] | None:
    """The names that a module has once it is imported; None for one that makes them as it is asked."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                if name == "__getattr__":
                    return None
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Import() | ast.ImportFrom():
                names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    return frozenset(names)


def missing(file: Path) -> list[str]:
    """Imports of a file whose module, or whose name in it, is not in the tree."""
    faults = []
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.ImportFrom) or node.level or not node.module:
            continue
        first, _, rest = node.module.partition(".")
        if first not in ("millrace", *FOLDERS):
            continue
        place = ROOT / (rest if first == "millrace" else node.module).replace(".", "/")
        module = place.with_suffix(".py") if place.with_suffix(".py").is_file() else place / "__init__.py"
        names = names_of(module) if module.is_file() else frozenset()
        if names is None:
            continue
        faults += [
            f"{node.module}.{alias.name}"
            for alias in node.names
            if alias.name not in names
            and not (place / alias.name).is_dir()
            and not (place / f"{alias.name}.py").is_file()
        ]
    return faults


@pytest.mark.parametrize("folder", FOLDERS)
def test_what_is_imported_from_the_tree_is_there(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    assert {str(file.relative_to(ROOT)): faults for file in files if (faults := missing(file))} == {}


def test_a_name_that_moved_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "moved.py"
    file.write_text("from tests.conftest import KERNEL\nfrom tests.nowhere import x\nfrom tests.conftest import vllm\n")
    assert missing(file) == ["tests.conftest.KERNEL", "tests.nowhere.x"]
