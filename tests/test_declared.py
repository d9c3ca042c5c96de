"""What the product imports is what it declares: its own files install all that it needs."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.support.house import ROOMS

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SGLANG = ROOT / "infra" / "engines" / "sglang"
NAMES = packages_distributions()


def normal(requirement: str) -> str:
    """The name of a requirement as registries compare it."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\s\[<>=!~;]", requirement)[0]).lower()


def declared() -> set[str]:
    """With what extras bring, whose imports are guarded where they are used."""
    extras = PROJECT["project"]["optional-dependencies"].values()
    return {normal(one) for one in [*PROJECT["project"]["dependencies"], *(two for extra in extras for two in extra)]}


def declared_for_sglang() -> set[str]:
    """What SGLang's environment has, in which the files beside the list run too, whatever the machine."""
    lists = [(SGLANG / name).read_text().splitlines() for name in ("cpu.in", "gpu.in")]
    return set.intersection(*({normal(line) for line in lines if line[:1].isalpha()} for lines in lists))


def imported(files: Iterable[Path]) -> dict[str, Path]:
    """The first name of every import of the files, and a file that has it."""
    found: dict[str, Path] = {}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            else:
                continue
            found |= {name.partition(".")[0]: file for name in names}
    return found


PRODUCT = [ROOT / "__init__.py", *(path for room in (*ROOMS, "examples") for path in (ROOT / room).rglob("*.py"))]
SIDES = {
    "millrace": ([file for file in PRODUCT if SGLANG not in file.parents], declared),
    "sglang": ([file for file in PRODUCT if SGLANG in file.parents], lambda: declared() | declared_for_sglang()),
}


@pytest.mark.parametrize("side", SIDES)
def test_what_is_imported_is_declared(side: str) -> None:
    files, names = SIDES[side]
    known = names()
    assert files
    for name, file in imported(files).items():
        if name in sys.stdlib_module_names or name == "millrace":
            continue
        distributions = {normal(one) for one in NAMES.get(name, [name])}
        assert distributions & known, f"{file.relative_to(ROOT)} imports {name}, which pyproject.toml does not declare"
