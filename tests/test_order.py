"""The order of a shared run names files that exist, and puts all that use the vLLM server into one process."""

from __future__ import annotations

import ast
from collections.abc import Collection
from pathlib import Path

from tests.support.order import ENGINE, LONGEST, place_of, scope_of

ROOT = Path(__file__).parents[1]


def asking_for_vllm(file: Path, fixtures: Collection[str]) -> list[str]:
    """The tests and fixtures of a file that take one of these fixtures, or `vllm` by hand."""
    asking = []
    for function in ast.walk(ast.parse(file.read_text())):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and (
            not fixtures.isdisjoint(one.arg for one in function.args.args) or _by_hand(function)
        ):
            asking.append(function.name)
    return asking


def _by_hand(function: ast.AST) -> bool:
    """`getfixturevalue("vllm")`, or `getfixturevalue(request.param)` where a parameter is "vllm"."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            given = {one.value for argument in node.args for one in ast.walk(argument) if isinstance(one, ast.Constant)}
            if node.func.attr in ("getfixturevalue", "param") and "vllm" in given:
                return True
    return False


def test_every_file_of_the_order_exists_once() -> None:
    assert len(set(LONGEST)) == len(LONGEST)
    assert not [file for file in LONGEST if not (ROOT / file).is_file()]


def test_all_that_use_the_server_are_one_scope() -> None:
    named = set()
    for file in ROOT.glob("tests/**/test_*.py"):
        conftest = file.parent / "conftest.py"
        shared = asking_for_vllm(conftest, {"vllm"}) if conftest.is_file() else []
        if asking_for_vllm(file, {"vllm", *shared}):
            named.add(str(file.relative_to(ROOT)))
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
