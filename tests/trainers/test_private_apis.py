"""What trainers use of other packages' private names stands in one module."""

from __future__ import annotations

import ast
from pathlib import Path

import millrace.trainers
from millrace.trainers import private_apis

ROOT = Path(millrace.trainers.__file__).parent
FILES = {path: ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def imports(tree: ast.Module) -> set[str]:
    """Private names that are imported."""
    names = [
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    ]
    return {name for name in names if any(is_private(part) for part in name.split("."))}


def attributes(tree: ast.Module) -> set[str]:
    """Private attributes of what is not `self` or `cls`."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and is_private(node.attr)
        if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    }


def names_of_ours(trees: list[ast.Module]) -> set[str]:
    """Private names that a module or class of trainers defines itself."""
    functions = [
        node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)
    ]
    fields = [
        node.attr
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if isinstance(node.value, ast.Name) and node.value.id == "self"
    ]
    return {name for name in [*functions, *fields] if is_private(name)}


def test_no_other_module_touches_a_private_name_of_another_package() -> None:
    ours = names_of_ours(list(FILES.values()))
    for path, tree in FILES.items():
        if path != Path(private_apis.__file__):
            assert imports(tree) == set(), path
            assert attributes(tree) <= ours, path


def test_it_would_see_one() -> None:
    tree = FILES[Path(private_apis.__file__)]
    assert {"torch.distributed.distributed_c10d._world"} <= imports(tree)
    assert {"_hp_mapping", "_attn_implementation"} <= attributes(tree)
