"""The order of a shared run names files that exist, and puts all that use the vLLM server into one process."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.support.order import ENGINE, LONGEST, place_of, scope_of

ROOT = Path(__file__).parents[1]


def asks_for_vllm(file: Path) -> bool:
    """Whether a test or fixture of a file takes the fixture `vllm`, by name or by hand."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and "vllm" in [one.arg for one in node.args.args]:
            return True
        # By hand: `getfixturevalue("vllm")`, or `getfixturevalue(request.param)` where a parameter is "vllm".
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            given = {one.value for argument in node.args for one in ast.walk(argument) if isinstance(one, ast.Constant)}
            if node.func.attr in ("getfixturevalue", "param") and "vllm" in given:
                return True
    return False


def test_every_file_of_the_order_exists_once() -> None:
    assert len(set(LONGEST)) == len(LONGEST)
    assert not [file for file in LONGEST if not (ROOT / file).is_file()]


def test_all_that_use_the_server_are_one_scope() -> None:
    using = {file for file in ROOT.glob("tests/**/*.py") if asks_for_vllm(file)}
    conftests = {file for file in using if file.name == "conftest.py"}
    named = {str(file.relative_to(ROOT)) for file in using - conftests}
    # Fixtures of a folder's conftest are asked for by files of that folder that say so with the mark.
    for conftest in conftests:
        marked = [file for file in conftest.parent.glob("test_*.py") if re.search(r"\brig\b", file.read_text())]
        named |= {str(file.relative_to(ROOT)) for file in marked}
    assert named == set(ENGINE)
    assert len({scope_of(f"{file}::test_x[a::b]") for file in ENGINE}) == 1
    sglang = {scope_of(f"{file}::test_x[sglang-a::b]") for file in ENGINE} | {scope_of("tests/test_sglang.py::test_x")}
    assert len(sglang) == 1


def test_a_file_that_is_not_named_comes_behind_and_stays_together() -> None:
    assert place_of("tests/a/test_b.py::test_c") > max(place_of(file) for file in LONGEST)
    assert scope_of("tests/a/test_b.py::test_c[x]") == scope_of("tests/a/test_b.py::TestD::test_e")


def test_files_with_slow_tests_come_before_those_without() -> None:
    slow = {"tests/z.py", LONGEST[0]}
    named = [LONGEST[1], "tests/a.py", "tests/z.py", LONGEST[0]]
    assert sorted(named, key=lambda file: place_of(f"{file}::test_it", slow)) == [
        *LONGEST[:2],
        "tests/z.py",
        "tests/a.py",
    ]
