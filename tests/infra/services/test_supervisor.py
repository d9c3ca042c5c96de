"""The supervisor: it restarts, takes changes, and cleans up after one that was killed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from infra.errors import ServiceError
from infra.services import leftovers
from infra.services.net import wait_until
from infra.services.supervisor import Program, State, Supervisor

SLEEP = 'import time; print("hello %s", flush=True); time.sleep(600)'


def sleeper(name: str, **environment: str) -> Program:
    return Program(name, [sys.executable, "-c", SLEEP], environment, healthy_s=1)


def poll(ready: Callable[[], bool]) -> None:
    wait_until(ready, "what the test waits for", 30, 0.05)


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    one = Supervisor(tmp_path, leftovers.deployment_id("test", tmp_path))
    yield one
    one.down()


def state(supervisor: Supervisor, name: str) -> State:
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
    assert "hello %s" in supervisor.log_tail("a")
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
    boss.wait(10)
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


@pytest.mark.slow
def test_down_ends_the_broker_after_those_who_need_it(supervisor: Supervisor, tmp_path: Path) -> None:
    end = "import signal, sys, time\ndef f(*_):\n    time.sleep(0.5); open({out!r}, 'a').write({name!r}); sys.exit(0)\n"
    wait = "signal.signal(signal.SIGTERM, f); print('ready', flush=True); time.sleep(600)"
    order = tmp_path / "order"
    code = {name: end.format(out=str(order), name=name[0]) + wait for name in ("broker", "x", "y")}
    supervisor.up([Program(name, [sys.executable, "-c", f"exec({text!r})"]) for name, text in code.items()])
    poll(lambda: all("ready" in supervisor.log_tail(name) for name in code))
    supervisor.down()
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
