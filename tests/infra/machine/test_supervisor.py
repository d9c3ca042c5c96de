"""The supervisor: it restarts, takes changes, and cleans up after one that was killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from millrace.infra.errors import ServiceError
from millrace.infra.machine import leftovers
from millrace.infra.machine.supervisor import Program, ProgramState, Supervisor
from millrace.infra.process.net import wait_until

SLEEP = 'import time; print("hello %s", flush=True); time.sleep(600)'


def sleeper(name: str, **environment: str) -> Program:
    return Program(name, [sys.executable, "-c", SLEEP], environment, healthy_s=1)


def poll(ready: Callable[[], bool]) -> None:
    wait_until(ready, "what the test waits for", 120, 0.05)


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    one = Supervisor(tmp_path, leftovers.deployment_id("test", tmp_path))
    yield one
    one.down()


def state(supervisor: Supervisor, name: str) -> ProgramState:
    return next(state for state in supervisor.states() if state.name == name)


def test_nothing_runs_before_up(tmp_path: Path) -> None:
    one = Supervisor(tmp_path, "nobody")
    assert not one.running()
    assert one.states() == []
    assert one.down() == []


@pytest.mark.slow
def test_what_is_killed_comes_back(supervisor: Supervisor) -> None:
    supervisor.up([sleeper("a")])
    poll(lambda: state(supervisor, "a").state == "RUNNING")
    first = supervisor.pid("a")
    assert first
    environment = psutil.Process(first).environ()
    assert environment["MILLRACE_ROLE"] == "a"
    assert "PYTHONDONTWRITEBYTECODE" not in environment
    os.kill(first, signal.SIGKILL)
    poll(lambda: state(supervisor, "a").state == "RUNNING" and supervisor.pid("a") != first)
    poll(lambda: "hello %s" in supervisor.log_tail("a"))  # it may run for a while before it says so
    for folder in (supervisor.folder, supervisor.logs, supervisor.socket.parent):
        assert folder.stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_up_again_touches_only_what_changed(supervisor: Supervisor) -> None:
    supervisor.up([sleeper("a"), sleeper("b"), sleeper("c")])
    poll(lambda: all(s.state == "RUNNING" for s in supervisor.states()))
    before = {s.name: s.pid for s in supervisor.states()}
    supervisor.up([sleeper("a"), sleeper("b", X='a "quoted" 100%, \\ one'), sleeper("d")])
    poll(lambda: len(supervisor.states()) == 3 and all(s.state == "RUNNING" for s in supervisor.states()))
    after = {s.name: s.pid for s in supervisor.states()}
    assert set(after) == {"a", "b", "d"}
    assert after["a"] == before["a"]
    assert after["b"] != before["b"]
    assert psutil.Process(after["b"]).environ()["X"] == 'a "quoted" 100%, \\ one'
    assert not psutil.pid_exists(before["c"] or 0)


@pytest.mark.slow
def test_a_home_is_one_deployments(supervisor: Supervisor) -> None:
    supervisor.up([sleeper("a")])
    poll(lambda: state(supervisor, "a").state == "RUNNING")
    pid, written = supervisor.pid("a"), (supervisor.folder / "supervisord.conf").read_text()
    other = Supervisor(supervisor.home, leftovers.deployment_id("other", supervisor.home))
    with pytest.raises(ServiceError, match=r"deployment test runs from .*: choose another home"):
        other.up([sleeper("b")])
    assert (supervisor.folder / "supervisord.conf").read_text() == written
    assert supervisor.pid("a") == pid


@pytest.mark.slow
def test_settings_in_the_environment_reach_programs_that_run_already(supervisor: Supervisor) -> None:
    def up(eta: str) -> int | None:
        one = Supervisor(supervisor.home, supervisor.deployment, {"MILLRACE_POLICY__ETA": eta})
        one.up([sleeper("a")])
        poll(lambda: state(one, "a").state == "RUNNING")
        pid = one.pid("a")
        assert psutil.Process(pid).environ()["MILLRACE_POLICY__ETA"] == eta
        return pid

    first = up("1")
    assert up("1") == first
    assert up("2") != first
    assert not psutil.pid_exists(first or 0)


@pytest.mark.slow
def test_up_after_kill_9_of_the_supervisor_leaves_no_twins(supervisor: Supervisor) -> None:
    supervisor.up([sleeper("a")])
    poll(lambda: state(supervisor, "a").state == "RUNNING")
    orphan = supervisor.pid("a")
    assert orphan
    boss = psutil.Process(orphan).parent()
    assert boss
    boss.kill()
    boss.wait(60)
    os.kill(orphan, signal.SIGSTOP)
    assert not supervisor.running()

    assert orphan in supervisor.up([sleeper("a")])
    poll(lambda: state(supervisor, "a").state == "RUNNING")
    alive = [p.pid for p in leftovers.find(supervisor.deployment, "a")]
    assert alive == [supervisor.pid("a")]


@pytest.mark.slow
def test_down_ends_everything(supervisor: Supervisor) -> None:
    supervisor.up([sleeper("a"), sleeper("b")])
    poll(lambda: all(s.state == "RUNNING" for s in supervisor.states()))
    supervisor.down()
    assert leftovers.find(supervisor.deployment) == []
    assert not supervisor.running()


def in_order(order: Path) -> list[Program]:
    """A broker and two programs that need it; each writes its first letter when it ends."""
    end = "import signal, sys, time\ndef f(*_):\n    time.sleep(0.5); open({out!r}, 'a').write({name!r}); sys.exit(0)\n"
    wait = "signal.signal(signal.SIGTERM, f); print('ready', flush=True); time.sleep(600)"
    code = {name: end.format(out=str(order), name=name[0]) + wait for name in ("broker", "x", "y")}
    return [Program(name, [sys.executable, "-c", f"exec({text!r})"]) for name, text in code.items()]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["down", "down after kill -9", "up after kill -9"])
def test_the_broker_ends_after_those_who_need_it(supervisor: Supervisor, tmp_path: Path, way: str) -> None:
    order = tmp_path / "order"
    programs = in_order(order)
    supervisor.up(programs)
    poll(lambda: all("ready" in supervisor.log_tail(program.name) for program in programs))
    assert supervisor.left_alone() == 0
    if "kill" in way:
        boss = psutil.Process(supervisor.pid("broker")).parent()
        assert boss
        boss.kill()
        boss.wait(60)
        assert supervisor.left_alone() == 3
    supervisor.up([]) if way.startswith("up") else supervisor.down()
    assert sorted(order.read_text()[:2]) == ["x", "y"]
    assert order.read_text()[2:] == "b"


@pytest.mark.slow
def test_what_cannot_start_is_tried_again_and_says_why(supervisor: Supervisor) -> None:
    supervisor.up([Program("bad", [sys.executable, "-c", "raise SystemExit('no luck')"])])
    poll(lambda: state(supervisor, "bad").state == "BACKOFF")
    poll(lambda: supervisor.log_tail("bad").count("no luck") >= 2)


@pytest.mark.slow
def test_an_unknown_program_is_named(supervisor: Supervisor) -> None:
    supervisor.up([sleeper("a")])
    with pytest.raises(ServiceError, match="programs: a"):
        supervisor.stop("b")
    supervisor.stop("a")
    supervisor.stop("a")
    supervisor.restart("a")
    poll(lambda: state(supervisor, "a").state == "RUNNING")


@pytest.mark.parametrize("value", ["two\nlines", "a ; b", "a # b"])
def test_what_the_supervisor_would_cut_is_refused(value: str, tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="leave out"):
        Supervisor(tmp_path, "cut").up([sleeper("a", X=value)])


# An API server that starts a core, which writes over its environment (as vLLM's do) and takes a session of its own.
CORE = (
    "import os, setproctitle, signal, time; os.setsid(); signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "setproctitle.setproctitle('CORE' + ' ' * 9000); time.sleep(600)"
)
SERVER = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CORE!r}])"


def core_of(server: int) -> psutil.Process | None:
    try:
        found = psutil.Process(server).children()
        return next((p for p in found if (p.cmdline() or [""])[0].startswith("CORE")), None)
    except psutil.NoSuchProcess:
        return None


def engine(supervisor: Supervisor, former: int = 0) -> tuple[psutil.Process, psutil.Process]:
    """A server, another one than the `former`, and its core."""
    found: list[psutil.Process] = []

    def there() -> bool:
        pid = supervisor.pid("engine")
        core = core_of(pid) if pid and pid != former else None
        found[:] = [psutil.Process(pid), core] if pid and core else []
        return bool(found)

    poll(there)
    return found[0], found[1]


@pytest.mark.slow
def test_down_ends_the_cores_of_a_server_that_was_killed(supervisor: Supervisor) -> None:
    supervisor.up([Program("engine", [sys.executable, "-c", SERVER], stop_s=2, healthy_s=1)])
    server, core = engine(supervisor)
    server.kill()
    _, second = engine(supervisor, server.pid)
    assert core.is_running()
    assert core.pid in supervisor.down(grace_s=60)
    assert not core.is_running()
    assert not second.is_running()


@pytest.mark.slow
def test_down_ends_what_outlived_a_supervisor_that_took_its_pid_file_along(supervisor: Supervisor) -> None:
    titled = CORE.replace("os.setsid();", "")
    supervisor.up([Program("engine", [sys.executable, "-c", SERVER.replace(CORE, titled)], stop_s=2, healthy_s=1)])
    server, core = engine(supervisor)
    server.kill()
    poll(lambda: core.ppid() != server.pid)
    boss = psutil.Process(core.ppid())
    boss.terminate()
    poll(lambda: not boss.is_running() or boss.status() == psutil.STATUS_ZOMBIE)
    assert core.is_running()
    assert core.pid in supervisor.down()
    assert not core.is_running()


@pytest.mark.slow
def test_a_role_that_starts_again_ends_the_cores_of_its_former_self(supervisor: Supervisor) -> None:
    """And leaves alone a server that has written over its own environment."""
    starts = (
        "import os, pathlib, sys, time; from millrace.infra.machine import leftovers;"
        "from millrace.infra.machine.supervisor import *;"
        f"left = leftovers.find({supervisor.deployment!r}, os.environ['MILLRACE_ROLE'],"
        f" programs=Supervisor(pathlib.Path({str(supervisor.home)!r}), {supervisor.deployment!r}).pids);"
        "leftovers.stop(left, grace_s=1);"
    )
    titled = "import setproctitle, time; setproctitle.setproctitle('TITLED' + ' ' * 9000); time.sleep(600)"
    supervisor.up(
        [
            Program("other", [sys.executable, "-c", titled], healthy_s=1),
            Program("engine", [sys.executable, "-c", starts + SERVER], stop_s=2, healthy_s=1),
        ]
    )
    poll(lambda: supervisor.pid("other") is not None)
    other = psutil.Process(supervisor.pid("other") or 0)
    poll(lambda: (other.cmdline() or [""])[0].startswith("TITLED"))
    server, core = engine(supervisor)
    server.kill()
    poll(lambda: not core.is_running() or core.status() == psutil.STATUS_ZOMBIE)
    engine(supervisor, server.pid)
    assert other.is_running()
    assert supervisor.pid("other") == other.pid


@pytest.mark.slow
def test_who_keeps_ending_is_failing_with_its_error_until_it_is_changed(supervisor: Supervisor) -> None:
    breaks = "import time; time.sleep(1.5); raise KeyError('grppo')"  # later than it counts as started
    never = "raise SystemExit('error: no module typo')"
    supervisor.up(
        [
            sleeper("well"),
            Program("breaks", [sys.executable, "-c", breaks], healthy_s=1),
            Program("never", [sys.executable, "-c", never], healthy_s=1),
        ]
    )
    poll(lambda: state(supervisor, "breaks").failing and state(supervisor, "never").failing)
    # Looked at while one of them is writing its error, the log ends otherwise.
    poll(lambda: state(supervisor, "breaks").said == "KeyError: 'grppo'")
    poll(lambda: state(supervisor, "never").said == "error: no module typo")
    assert state(supervisor, "breaks").ended >= 2
    assert not state(supervisor, "well").failing
    supervisor.up([sleeper("well"), sleeper("breaks"), sleeper("never")])
    poll(lambda: all(s.state == "RUNNING" for s in supervisor.states()))
    assert not any(s.failing or s.ended for s in supervisor.states())


def _another(one: Supervisor, former: int) -> bool:
    return one.pid("a") not in (None, former)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MB; the test is skipped where none may be mounted."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(place)], capture_output=True).returncode:
        pytest.skip("only root may mount a disk")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.slow
def test_a_full_disk_costs_log_lines_and_not_the_supervisor(tiny_disk: Path) -> None:
    one = Supervisor(tiny_disk, leftovers.deployment_id("test", tiny_disk))
    chatty = (
        "import itertools, time; [time.sleep(0.01) for _ in itertools.count() if not print('x' * 20000, flush=True)]"
    )
    try:
        one.up([Program("chatty", [sys.executable, "-c", chatty], healthy_s=1), sleeper("a")])
        poll(lambda: all(s.state == "RUNNING" for s in one.states()))
        poll(lambda: shutil.disk_usage(tiny_disk).free < 20000)
        for _ in range(3):
            pid = one.pid("a")
            assert pid
            os.kill(pid, signal.SIGKILL)
            poll(partial(_another, one, pid))
        assert one.running()
        (tiny_disk / "logs" / "chatty.log").write_bytes(b"")
        poll(lambda: "xxx" in one.log_tail("chatty"))
    finally:
        one.down()


@pytest.mark.slow
def test_a_read_only_disk_is_one_line(tiny_disk: Path) -> None:
    (tiny_disk / "home").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True)
    done = subprocess.run(
        [sys.executable, "-m", "millrace.apps.cli.main", "--set", f"home={tiny_disk}/home", "up"],
        cwd=tiny_disk.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "read-only" in done.stderr.lower()
