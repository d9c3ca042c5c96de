"""The tables of a run lose no test and no second, in one process and in several."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.summary import file, folder, seconds

ROOT = Path(__file__).parents[1]
NODES = st.builds(
    lambda parts, name, test: "/".join(["tests", *parts, f"test_{name}.py::test_{test}"]),
    st.lists(st.sampled_from("abc"), max_size=3),
    st.sampled_from("xy"),
    st.sampled_from(["one", "two[a/b::c]"]),
)


def report(nodeid: str, duration: float) -> pytest.TestReport:
    return pytest.TestReport(nodeid, ("", 0, ""), {}, "passed", None, "call", duration=duration)


@given(st.lists(st.tuples(NODES, st.integers(0, 1000))), st.sampled_from([file, folder]))
def test_parts_add_up(given_: list[tuple[str, int]], part: object) -> None:
    rows = seconds([report(nodeid, duration) for nodeid, duration in given_], file if part is file else folder)
    assert sum(spent for _, spent, _ in rows) == sum(duration for _, duration in given_)
    assert sum(tests for *_, tests in rows) == len({nodeid for nodeid, _ in given_})
    assert len({name for name, *_ in rows}) == len(rows)
    assert [spent for _, spent, _ in rows] == sorted((spent for _, spent, _ in rows), reverse=True)


def test_a_folder_is_a_room() -> None:
    assert folder("tests/consumers/audit/test_a.py::test_b[c/d]") == "tests/consumers"
    assert folder("tests/chaos/test_a.py::test_b") == "tests/chaos"
    assert folder("tests/test_a.py::test_b") == "tests"


@pytest.mark.slow
def test_a_run_in_several_processes_ends_with_its_parts(tmp_path: Path) -> None:
    for name in ("tests/a/b/test_x.py", "tests/a/test_y.py", "tests/c/test_z.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("def test_one(): pass\ndef test_two(): pass\n")
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT}\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.summary", "--import-mode=importlib"]
    done = subprocess.run(
        [*command, "-n", "2", "--durations", "2"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    tables = re.findall(r"^ +[\d.]+ s +(\d+) tests  (\S+)$", done.stdout, re.MULTILINE)
    assert sorted(tables[:2]) == [("2", "tests/c"), ("4", "tests/a")]
    assert tables[2] == ("6", "all")
    assert sorted(tables[3:]) == [("2", "tests/a/b/test_x.py"), ("2", "tests/a/test_y.py"), ("2", "tests/c/test_z.py")]
    quiet = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "seconds by folder" not in quiet.stdout
