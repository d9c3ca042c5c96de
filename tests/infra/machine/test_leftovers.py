"""Whose process is it: also when it has written over its environment, and when everybody above it is gone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from millrace.infra.machine import leftovers
from millrace.infra.process.net import wait_until

# A role that starts a worker under a title of its own, as vLLM does; setproctitle writes over /proc/PID/environ.
WORKER = "import setproctitle, time; setproctitle.setproctitle('WORKER' + ' ' * 9000); time.sleep(600)"
ROLE = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WORKER!r}])"
BOSS = (
    "import os, subprocess, sys, time;"
    "env = os.environ | {'MILLRACE_ROLE': 'engine'};"
    f"subprocess.run([sys.executable, '-c', {ROLE!r}], env=env, process_group=0);"
    "time.sleep(600)"
)


@pytest.fixture
def boss(tmp_path: Path) -> Iterator[psutil.Popen]:
    environment = os.environ | {leftovers.DEPLOYMENT: leftovers.deployment_id("test", tmp_path)}
    environment.pop(leftovers.ROLE, None)
    process = psutil.Popen([sys.executable, "-c", BOSS], env=environment, start_new_session=True)
    wait_until(lambda: _worker(process) is not None, "the worker", 120)
    family = [process, *process.children(recursive=True)]
    yield process
    for one in family:
        if one.is_running():
            one.kill()
    psutil.wait_procs(family, 10)


def _worker(boss: psutil.Process) -> psutil.Process | None:
    return next((p for p in boss.children(recursive=True) if (p.cmdline() or [""])[0].startswith("WORKER")), None)


@pytest.mark.slow
def test_a_worker_under_another_title_belongs_to_its_role(boss: psutil.Popen, tmp_path: Path) -> None:
    deployment, worker = leftovers.deployment_id("test", tmp_path), _worker(boss)
    assert worker
    role = worker.parent()
    assert role
    assert leftovers.DEPLOYMENT not in worker.environ()
    expected = {boss.pid: leftovers.SUPERVISOR, role.pid: "engine", worker.pid: "engine"}
    assert {p.pid: name for p, name in leftovers.members(deployment).items()} == expected
    assert {p.pid for p in leftovers.find(deployment, "engine")} == {role.pid, worker.pid}
    assert leftovers.find(deployment, "gateway") == []
    assert leftovers.members("test:elsewhere") == {}

    role.kill()
    wait_until(lambda: not role.is_running() or role.status() == psutil.STATUS_ZOMBIE, "its end", 120)
    assert leftovers.members(deployment)[worker] == leftovers.ORPHAN
    assert worker in leftovers.find(deployment, "engine")


@pytest.mark.slow
def test_a_worker_that_outlived_everybody_is_found_by_its_session(boss: psutil.Popen, tmp_path: Path) -> None:
    deployment, worker = leftovers.deployment_id("test", tmp_path), _worker(boss)
    assert worker
    role = worker.parent()
    assert role
    boss.kill()
    boss.wait(60)
    role.kill()
    wait_until(lambda: worker.ppid() not in (role.pid, boss.pid), "the worker's adoption", 120)
    assert leftovers.find(deployment, sessions=[boss.pid]) == [worker]
    assert leftovers.stop([worker], grace_s=5) == [worker.pid]
    assert not worker.is_running()


def test_a_session_of_somebody_else_is_left_alone() -> None:
    with psutil.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as somebody:
        assert leftovers.members("test:nowhere", sessions=[somebody.pid]) == {}


# Asks in a session of its own whose leader is gone, as it is under many build servers.
ASKS = (
    "import os, pathlib, sys, time; leader = os.getpid();"
    "os._exit(0) if os.fork() else None;"
    "from millrace.infra.machine import leftovers; from millrace.infra.process.net import wait_until;"
    "wait_until(lambda: os.getppid() != leader, 'the end of the leader', 100);"
    "pathlib.Path(sys.argv[1]).write_text(repr(leftovers.members('test:nowhere', sessions=[leader])))"
)


def test_the_session_that_asks_is_left_alone_also_without_its_leader(tmp_path: Path) -> None:
    said = tmp_path / "said"
    subprocess.run([sys.executable, "-c", ASKS, str(said)], check=True, start_new_session=True)
    wait_until(lambda: said.exists() and said.read_text() != "", "the answer", 120)
    assert said.read_text() == "{}"


def test_stopping_what_is_gone_is_no_error() -> None:
    done = subprocess.Popen([sys.executable, "-c", ""])
    process = psutil.Process(done.pid)
    done.wait()
    assert leftovers.stop([process], grace_s=1) == [done.pid]
