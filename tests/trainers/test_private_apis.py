"""What trainers use of other packages' private names stands in one room."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import millrace.trainers
from millrace.trainers import private_apis
from millrace.trainers.private_apis import deepspeed, process_groups, transformers

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
        if path.parent != Path(private_apis.__file__).parent:
            assert imports(tree) == set(), path
            assert attributes(tree) <= ours, path


def test_it_would_see_one() -> None:
    assert {"torch.distributed.distributed_c10d._world"} <= imports(FILES[Path(process_groups.__file__)])
    assert "_hp_mapping" in attributes(FILES[Path(deepspeed.__file__)])
    assert "_attn_implementation" in attributes(FILES[Path(transformers.__file__)])


def test_what_takes_weights_loads_neither_transformers_nor_fsdp() -> None:
    source = "import sys, millrace.trainers.weights.broadcast; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True).stdout.split()
    assert "torch.distributed" in loaded
    assert not {"transformers", "torch.distributed.fsdp", "torch.distributed.tensor"} & set(loaded)
