"""Unit tests run for real: what a program does to its tests costs its own verdict only, and nothing of it stays.

Each runs in namespaces and without. Where the kernel refuses them, what is promised of them alone is skipped."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.infra.config import Reward, RewardTests
from millrace.infra.errors import RewardError
from millrace.streams.reward import running
from millrace.streams.reward.choose import choose
from millrace.streams.reward.limit_command import DUMPABLE, LIBC
from millrace.streams.reward.pool import Verdict
from millrace.streams.reward.running import UnitTests, namespace_fault, run
from millrace.streams.reward.unit_tests import How
from tests.support import logged

pytestmark = pytest.mark.slow

needs_namespaces = pytest.mark.skipif(bool(namespace_fault()), reason=f"no namespaces here: {namespace_fault()}")
both = pytest.mark.parametrize("namespaces", [pytest.param(True, marks=needs_namespaces), False])

TEST = "import solution\nassert solution.double(4) == 8\nprint('all well')\n"
JUNIT = """
import pathlib, solution
right = [solution.double(n) == 2 * n for n in range(4)]
cases = "".join("<testcase/>" if one else "<testcase><failure/></testcase>" for one in right)
pathlib.Path("report.xml").write_text(f"<testsuite>{cases}</testsuite>")
"""
COMMAND = (sys.executable, "-B", "check.py")


async def judged(
    output: str,
    test: str = TEST,
    *,
    namespaces: bool,
    report: str = "",
    timeout_s: float = 60,
    memory_mb: int = 1024,
    command: tuple[str, ...] = COMMAND,
    count: int = 0,
) -> Verdict:
    options = RewardTests(command=command, report=report, memory_mb=memory_mb, namespaces=namespaces)
    tests = UnitTests(options, workers=1, timeout_s=timeout_s)
    try:
        return await tests.judge(json.dumps({"tests": {"files": {"check.py": test}, "count": count}}), output, {})
    finally:
        tests.close()


@pytest.fixture(autouse=True)
def shown() -> Iterator[None]:
    """Without namespaces this process hides itself for good, which other tests do not expect."""
    yield
    LIBC.prctl(DUMPABLE, 1, 0, 0, 0)


def test_without_namespaces_the_role_hides_itself_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    """The kernel then keeps its environment, memory and descriptors from who is not root."""
    UnitTests(RewardTests(command=COMMAND, namespaces=False), workers=1, timeout_s=1).close()
    assert LIBC.prctl(DUMPABLE - 1, 0, 0, 0, 0) == 0, "PR_GET_DUMPABLE"
    assert logged.lines(caplog, "millrace.streams.reward") == [
        "verifier tests: programs run with the rights of the reward role and its network, in no namespaces "
        "([reward.tests] namespaces is off)"
    ]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where private directories are made."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@both
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
async def test_a_program_is_judged_by_its_tests(output: str, value: float, label: str, namespaces: bool) -> None:
    found = await judged(output, namespaces=namespaces)
    assert (found.value, found.label, found.failure) == (value, label, None)
    assert ("all well" in (found.critique or "")) == (label == "passed")


@both
async def test_a_report_gives_the_share_of_tests_that_passed(namespaces: bool) -> None:
    program = "def double(n):\n    return 2 * n if n < 3 else 0\n"
    found = await judged(program, JUNIT, report="report.xml", namespaces=namespaces)
    assert (found.value, found.components) == (0.75, {"tests.passed": 3.0, "tests.total": 4.0})
    found = await judged(program, JUNIT, report="report.xml", namespaces=namespaces, count=6)
    assert found.value == 0.5


@both
@pytest.mark.parametrize(
    "program",
    [
        "import os\nos._exit(0)",
        "import os\nos.symlink('/dev/zero', 'report.xml')\nos._exit(0)",
        "import os\nos.mkfifo('report.xml')\nos._exit(0)",
        "import os\nos.mkdir('report.xml')\nos._exit(0)",
        "import os\nopen('report.xml', 'w').write('<a><testcase/></a>')\nos._exit(1)",
        "import os\nopen('report.xml', 'wb').truncate(8 << 20)\nos._exit(0)",
    ],
)
async def test_a_program_that_ends_its_tests_early_has_passed_none_where_they_report(
    program: str, namespaces: bool
) -> None:
    found = await judged(program, JUNIT, report="report.xml", namespaces=namespaces)
    assert (found.value, found.failure) == (0.0, None)


@pytest.mark.parametrize(
    ("ending", "value"),
    [
        ("return 8", 1 / 3),
        ("import unittest; raise unittest.SkipTest", 1 / 3),
        ("raise KeyboardInterrupt", 0.0),
        ("import pytest; pytest.exit('', 0)", 2 / 3),
    ],
)
async def test_tests_that_a_program_stops_are_tests_that_it_fails(ending: str, value: float) -> None:
    """With pytest itself, in namespaces where there are any. pytest's own end leaves the tests that it stops out of the
    report: the task says how many there are."""
    tests = "from solution import double\n" + "".join(
        f"def test_{n}():\n    assert double({n}) == {2 * n}\n" for n in (4, 5, 7)
    )
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=report.xml", "check.py")
    program = f"def double(n):\n    if n == 4:\n        return 8\n    {ending}\n"
    found = await judged(program, tests, report="report.xml", namespaces=True, command=command, count=3)
    assert (found.value, found.label) == (pytest.approx(value), "failed")


@both
async def test_a_program_that_never_ends_is_worth_nothing_and_is_gone(namespaces: bool) -> None:
    found = await judged("while True: pass", timeout_s=1.0, namespaces=namespaces)
    assert (found.value, found.label) == (0.0, "timeout")


@both
async def test_a_program_cannot_take_more_memory_than_it_may(namespaces: bool) -> None:
    found = await judged("x = bytearray(1 << 30)", memory_mb=256, namespaces=namespaces)
    assert found.value == 0.0
    assert "MemoryError" in (found.critique or "")


@both
async def test_a_program_sees_none_of_our_environment(monkeypatch: pytest.MonkeyPatch, namespaces: bool) -> None:
    monkeypatch.setenv("MILLRACE_SECRET", "word")
    seen = "import os, json\nprint(json.dumps(sorted(os.environ)))\n"
    found = await judged("", seen, namespaces=namespaces)
    names = set(json.loads(found.critique or ""))
    assert names <= {"PATH", "HOME", "TMPDIR", "LANG", "LC_CTYPE", "PYTHONDONTWRITEBYTECODE"}


PIPES = """
import os
for name in os.listdir(f"/proc/{os.getppid()}/fd"):
    try:
        pipe = os.readlink(f"/proc/{os.getppid()}/fd/{name}")
        if pipe.startswith("pipe:") and pipe not in OTHERS:
            kept = os.open(f"/proc/{os.getppid()}/fd/{name}", os.O_WRONLY | os.O_NONBLOCK)
            %s
    except OSError:
        pass
"""
STAYS = "\nimport os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(15)\nos._exit(1)"


@both
@pytest.mark.parametrize(
    "program",
    [
        "import os\nos.mkfifo('../printed')\nos._exit(1)",
        "import os\nos.rename('../work', '../other')\nos._exit(1)",
        "import os\nfor _ in range(3000):\n    os.mkdir('d')\n    os.chdir('d')\nos._exit(1)",
        "import os\nos.makedirs('d/e')\nfor one in ('d/e', 'd', '.'):\n    os.chmod(one, 0)\nos._exit(1)",
        PIPES % "os.write(kept, b'x refused\\n' * 999)" + "os._exit(1)",
        PIPES % "os.set_inheritable(kept, True)" + STAYS,
        "import os\nwhile True: os.write(1, b'x' * 65536)",
    ],
)
async def test_whatever_a_program_does_is_a_value_of_0_and_nothing_is_left(
    program: str, namespaces: bool, place: Path
) -> None:
    pipes = [os.readlink(one) for one in Path("/proc/self/fd").iterdir() if one.is_fifo()]  # those of these tests
    found = await judged(f"OTHERS = {pipes}\n{program}", namespaces=namespaces)
    assert (found.value, found.failure) == (0.0, None)
    assert list(place.iterdir()) == []


@both
async def test_more_descriptors_than_select_can_hold_change_nothing(namespaces: bool) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        pytest.skip("this machine allows too few descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        found = await judged("import signal\nsignal.pause()", timeout_s=1.0, namespaces=namespaces)
    finally:
        for one in held:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (found.value, found.label) == (0.0, "timeout")


@pytest.fixture
def living(tmp_path: Path) -> Iterator[tuple[str, int]]:
    """(path, descriptor) of a FIFO: who holds it open for writing lives, its end is the end of the file."""
    path = tmp_path / "living"
    os.mkfifo(path)
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reading, True)
    try:
        yield str(path), reading
    finally:
        os.close(reading)


@pytest.mark.parametrize(
    ("namespaces", "apart"),
    [
        pytest.param(True, "os.setsid()", marks=needs_namespaces),
        pytest.param(True, "", marks=needs_namespaces),
        (False, ""),
    ],
)
def test_what_a_run_started_ends_with_it(tmp_path: Path, living: tuple[str, int], namespaces: bool, apart: str) -> None:
    """In a session of its own only namespaces end it."""
    path, reading = living
    (tmp_path / "work").mkdir()
    script = (
        f"import os, signal\nout = os.open({path!r}, os.O_WRONLY)\nos.write(out, b'here')\n"
        f"if os.fork() == 0:\n    {apart or 'pass'}\n    signal.pause()\n"
    )
    ran = run(
        (sys.executable, "-c", script),
        tmp_path / "work",
        timeout_s=60,
        memory_bytes=1 << 30,
        report="",
        is_boxed=namespaces,
    )
    with os.fdopen(os.dup(reading), "rb") as rest:
        assert rest.read() == b"here"  # waits for the child's end, which a run does not outlive
    assert (ran.how, ran.status) == (How.EXIT, 0)


@needs_namespaces
def test_a_run_ends_with_the_role_that_was_killed(tmp_path: Path, living: tuple[str, int]) -> None:
    path, reading = living
    work = tmp_path / "work"
    work.mkdir()
    program = (
        "import os, signal\nif os.fork():\n    signal.pause()\nos.setsid()\n"
        f"out = os.open({path!r}, os.O_WRONLY)\nos.write(out, b'x')\nsignal.pause()\n"
    )
    role = (
        "import pathlib, sys\nfrom millrace.streams.reward.running import run\n"
        f"run((sys.executable, '-c', {program!r}), pathlib.Path({str(work)!r}), timeout_s=600,"
        " memory_bytes=1 << 30, report='', is_boxed=True)\n"
    )
    held = os.open(path, os.O_WRONLY)  # by the role: the first read waits, and ends if it fails
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", role], pass_fds=(held,), env=environment) as process:
        os.close(held)
        begun = os.read(reading, 1)
        process.kill()
    assert begun == b"x"
    assert os.read(reading, 1) == b""


@needs_namespaces
async def test_in_namespaces_a_program_reaches_no_process_no_network_and_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "ours").write_text("ours")
    with socket.create_server(("127.0.0.1", 0)) as server:
        test = f"""
import os, socket
assert all(int(name) < 9 for name in os.listdir("/proc") if name.isdigit()), "a process of others"
assert os.getuid() != 0, "root"
for mine in ("environ", "mem"):
    try:
        open(f"/proc/{{os.getppid()}}/{{mine}}", "rb").read()
        raise SystemExit("it reads " + mine)
    except PermissionError:
        pass
for forbidden in (
    lambda: socket.create_connection(("127.0.0.1", {server.getsockname()[1]})),
    lambda: open({str(tmp_path / "ours")!r}, "w"),
    lambda: open({str(tmp_path / "new")!r}, "w"),
):
    try:
        forbidden()
    except OSError:
        continue
    raise SystemExit("it got out")
own = socket.create_server(("127.0.0.1", 0))
socket.create_connection(own.getsockname())
try:
    os.kill(1, 9)
    os.killpg(0, 0)
except ProcessLookupError:
    pass
print("all well")
"""
        found = await judged("", test, namespaces=True)
    assert (found.label, found.critique) == ("passed", "all well\n")
    assert (tmp_path / "ours").read_text() == "ours"


@needs_namespaces
@pytest.mark.parametrize(
    ("bound", "program"),
    [
        ("SPACE_BYTES", "for n in range(9):\n    open(str(n), 'wb').write(bytes(1 << 20))\n"),
        ("PROCESSES", "import os, signal\nfor _ in range(40):\n    os.fork() or signal.pause()\nsignal.pause()\n"),
    ],
)
async def test_all_that_a_run_takes_together_is_bounded(
    bound: str, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, bound, 4 << 20 if bound == "SPACE_BYTES" else 8)
    found = await judged(program, "import solution\n", namespaces=True)
    assert (found.value, found.failure) == (0.0, None)
    assert found.label != "timeout"


@needs_namespaces
async def test_the_memory_of_all_processes_of_a_run_is_bounded() -> None:
    one = "    if os.fork() == 0:\n        x = b'x' * (100 << 20)\n        signal.pause()\n"
    program = f"import os, signal\nfor _ in range(3):\n{one}signal.pause()\n"
    found = await judged(program, memory_mb=200, namespaces=True)
    assert (found.value, found.label) == (0.0, "killed")


@pytest.mark.parametrize(
    ("said", "isolated", "how", "status"),
    [
        ("", False, How.EXIT, "1"),
        ("T refused why", False, How.NO_START, "why"),
        ("x refused why", False, How.EXIT, "1"),
        ("", True, How.NO_START, "it did not begin"),
        ("T began\nT ended 3", True, How.EXIT, "3"),
        ("T began\nT timeout", True, How.TIMEOUT, "-9"),
        ("T began", True, How.EXIT, "-9"),
        ("T refused no such file\nT began\nT ended 127", True, How.NO_START, "no such file"),
    ],
)
def test_only_who_knows_the_token_says_how_a_run_ended(said: str, isolated: bool, how: How, status: str) -> None:
    assert running._how(said.encode(), "T", 1, True, isolated) == (how, status)


@both
def test_a_command_that_cannot_start_says_so(tmp_path: Path, namespaces: bool) -> None:
    (tmp_path / "no-program").write_text("no script")
    command = (str(tmp_path / "no-program"),)
    ran = run(command, tmp_path, timeout_s=60, memory_bytes=1 << 30, report="", is_boxed=namespaces)
    assert ran.how is How.NO_START
    assert "Permission denied" in ran.output


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
