"""Unit tests run for real: what a program does to its tests costs its own verdict only, and nothing of it stays."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from millrace.infra.config import Reward, RewardTests
from millrace.infra.errors import RewardError
from millrace.streams.reward.choose import choose
from millrace.streams.reward.pool import Verdict
from millrace.streams.reward.running import UnitTests, run
from millrace.streams.reward.unit_tests import How

pytestmark = pytest.mark.slow

TEST = "import solution\nassert solution.double(4) == 8\nprint('all well')\n"
JUNIT = """
import pathlib, solution
right = [solution.double(n) == 2 * n for n in range(4)]
cases = "".join("<testcase/>" if one else "<testcase><failure/></testcase>" for one in right)
pathlib.Path("report.xml").write_text(f"<testsuite>{cases}</testsuite>")
"""
COMMAND = (sys.executable, "-B", "check.py")


async def judged(
    output: str, test: str = TEST, *, report: str = "", timeout_s: float = 60, memory_mb: int = 1024
) -> Verdict:
    options = RewardTests(command=COMMAND, report=report, memory_mb=memory_mb)
    tests = UnitTests(options, workers=1, timeout_s=timeout_s)
    try:
        return await tests.judge(json.dumps({"tests": {"files": {"check.py": test}}}), output, {})
    finally:
        tests.close()


@pytest.mark.parametrize(
    ("output", "value", "label"),
    [
        ("def double(n):\n    return 2 * n\n", 1.0, "passed"),
        ("Here:\n```python\ndef double(n):\n    return n + n\n```\nDone.", 1.0, "passed"),
        ("def double(n):\n    return n\n", 0.0, "failed"),
        ("no program at all", 0.0, "failed"),
        ("half \ud800", 0.0, "failed"),
        ("import os\nos.kill(os.getpid(), 9)", 0.0, "killed"),
    ],
)
async def test_a_program_is_judged_by_its_tests(output: str, value: float, label: str) -> None:
    found = await judged(output)
    assert (found.value, found.label, found.failure) == (value, label, None)
    assert ("all well" in (found.critique or "")) == (label == "passed")


async def test_a_report_gives_the_share_of_tests_that_passed() -> None:
    found = await judged("def double(n):\n    return 2 * n if n < 3 else 0\n", JUNIT, report="report.xml")
    assert (found.value, found.components) == (0.75, {"tests.passed": 3.0, "tests.total": 4.0})


@pytest.mark.parametrize(
    "program",
    [
        "import os\nos._exit(0)",
        "import os\nos.symlink('/dev/zero', 'report.xml')\nos._exit(0)",
        "import os\nos.mkfifo('report.xml')\nos._exit(0)",
    ],
)
async def test_a_program_that_ends_its_tests_early_has_passed_none_where_they_report(program: str) -> None:
    assert (await judged(program, JUNIT, report="report.xml")).value == 0.0


async def test_a_program_that_never_ends_is_worth_nothing_and_is_gone() -> None:
    found = await judged("while True: pass", timeout_s=1.0)
    assert (found.value, found.label) == (0.0, "timeout")


async def test_a_program_cannot_take_more_memory_than_it_may() -> None:
    found = await judged("x = bytearray(1 << 30)", memory_mb=256)
    assert found.value == 0.0
    assert "MemoryError" in (found.critique or "")


async def test_a_program_sees_none_of_our_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_SECRET", "word")
    seen = "import os, json\nprint(json.dumps(sorted(os.environ)))\n"
    found = await judged("", seen)
    names = set(json.loads(found.critique or ""))
    assert names <= {"PATH", "HOME", "TMPDIR", "LANG", "LC_CTYPE", "PYTHONDONTWRITEBYTECODE"}


def test_what_a_run_started_in_its_group_ends_with_it(tmp_path: Path) -> None:
    """The child holds a pipe open for as long as it lives: its end is the end of the file."""
    reading, writing = os.pipe()
    (tmp_path / "work").mkdir()
    # The launcher is given no descriptor but its own: the child opens this process's by its place.
    script = (
        "import os, subprocess, sys\n"
        f"out = os.open('/proc/{os.getpid()}/fd/{writing}', os.O_WRONLY)\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], pass_fds=(out,))\n"
    )
    ran = run(
        (sys.executable, "-c", script),
        tmp_path / "work",
        tmp_path / "printed",
        timeout_s=60,
        memory_bytes=1 << 30,
        report="",
    )
    os.close(writing)
    with os.fdopen(reading, "rb") as rest:
        assert rest.read() == b""  # waits for the child's end, which a run does not outlive
    assert (ran.how, ran.status) == (How.EXITED, 0)


def test_a_command_that_cannot_start_says_so(tmp_path: Path) -> None:
    (tmp_path / "no-program").write_text("no script")
    ran = run(
        (str(tmp_path / "no-program"),), tmp_path, tmp_path / "printed", timeout_s=60, memory_bytes=1 << 30, report=""
    )
    assert ran.how is How.NOT_STARTED


async def test_a_task_without_tests_is_a_labelled_failure() -> None:
    tests = choose(Reward(verifier="tests", tests=RewardTests(command=COMMAND)))
    try:
        found = [await tests.judge(task, "x", {}) for task in ("{}", "[1]", "torn")]
    finally:
        tests.close()
    assert [one.failure for one in found] == ["no_tests", "no_tests", "error: JSONDecodeError"]


@pytest.mark.parametrize("command", [(), ("no-such-program",)])
def test_a_command_that_is_none_is_said_at_once(command: tuple[str, ...]) -> None:
    with pytest.raises(RewardError, match=r"command"):
        choose(Reward(verifier="tests", tests=RewardTests(command=command)))
