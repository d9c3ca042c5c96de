"""The processes of a deployment, those included that a killed supervisor or a killed role left behind.

Every process of a deployment inherits MILLRACE_DEPLOYMENT, and every process of a role MILLRACE_ROLE. Programs that
write a title over their environment (the cores of an engine) are found by their session, which is the supervisor's,
and by who started them: so workers are found even when everybody above them is gone. Those that also took a session of
their own are found while the supervisor lives, which adopts them (`keeper`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

import psutil

from millrace.infra.errors import ServiceError

DEPLOYMENT = "MILLRACE_DEPLOYMENT"
ROLE = "MILLRACE_ROLE"
SUPERVISOR, ORPHAN = "supervisor", "orphan"
"""what `members` calls processes that belong to no role, and those whose role is gone and unknown"""


class _Row(NamedTuple):
    process: psutil.Process
    environment: dict[str, str]
    session: int
    parent: int


def deployment_id(namespace: str, home: Path) -> str:
    """One deployment on this machine: its namespace and where it keeps its files."""
    return f"{namespace}:{home.absolute()}"


def members(
    deployment: str, sessions: Collection[int] = (), programs: Callable[[], Collection[int]] = tuple
) -> dict[psutil.Process, str]:
    """Every live process of a deployment with its role. `sessions`: ids that its supervisors are known to have had.

    `programs` gives the ids of those that the supervisor keeps now: one of them that has written over its environment
    would pass for an orphan. It is asked after the processes were looked at, so that none is younger than its answer.
    """
    rows = _rows()
    pids = programs()
    marks = {pid for pid, row in rows.items() if row.environment.get(DEPLOYMENT) == deployment}
    ids = {rows[pid].session for pid in marks} | set(sessions)
    # A session whose leader lives and is not ours is somebody's terminal. The one that asks is ours if its leader is.
    session = os.getsid(0)
    our_sessions = {one for one in ids if one in marks or (one not in rows and one != session)}
    below = _below(marks, rows)
    return {
        row.process: _role(pid, rows, marks, pids)
        for pid, row in rows.items()
        if pid in marks or pid in below or row.session in our_sessions
    }


def find(
    deployment: str,
    role: str | None = None,
    sessions: Collection[int] = (),
    programs: Callable[[], Collection[int]] = tuple,
    skips: Collection[str] = (),
) -> list[psutil.Process]:
    """Processes of a deployment (of one role of it, and orphans), less those of the roles `skips`, this one and those
    that started it."""
    ancestors = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    roles = None if role is None else (role, ORPHAN)
    return [
        process
        for process, its_role in members(deployment, sessions, programs).items()
        if process.pid not in ancestors and its_role not in skips and (roles is None or its_role in roles)
    ]


def stop(processes: list[psutil.Process], grace_s: float = 10) -> list[int]:
    """SIGTERM to all, SIGKILL to those left after `grace_s` (frozen ones too); gives their ids."""
    for process in processes:
        _signal(process, kill=False)
    _, survivors = psutil.wait_procs(processes, timeout=grace_s)
    for process in survivors:
        _signal(process, kill=True)
    _, survivors = psutil.wait_procs(survivors, timeout=10)
    if survivors:
        raise ServiceError(
            f"processes {[p.pid for p in survivors]} do not end, not even by SIGKILL: see what holds them"
        )
    return [process.pid for process in processes]


def _signal(process: psutil.Process, kill: bool) -> None:
    try:
        process.kill() if kill else process.terminate()
    except psutil.NoSuchProcess:
        return


def _rows() -> dict[int, _Row]:
    """Live processes of this user by id."""
    rows = {}
    for process in psutil.process_iter():
        try:
            row = _Row(process, process.environ(), os.getsid(process.pid), process.ppid())
        except (psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError, PermissionError):
            continue
        rows[process.pid] = row
    return rows


def _below(marks: Collection[int], rows: dict[int, _Row]) -> set[int]:
    """Those below a supervisor that bear no mark of their own. What somebody started from a marked shell is not ours
    to end, so only what a supervisor or a role started counts, which lead a session or bear a role."""
    parents = {pid for pid in marks if rows[pid].session == pid or ROLE in rows[pid].environment}
    below: set[int] = set()
    for pid in rows:
        line = []
        at = pid
        while at in rows and at not in parents and at not in below:
            line.append(at)
            at = rows[at].parent
        if at in rows:
            below.update(line)
    return below


def _role(pid: int, rows: dict[int, _Row], marks: Collection[int], pids: Collection[int]) -> str:
    """The role of the nearest marked process upwards. Whom the supervisor had to adopt is an orphan."""
    first = pid
    while pid in rows and pid not in marks:
        if pid in pids:
            return SUPERVISOR
        pid = rows[pid].parent
    if pid not in marks:
        return ORPHAN
    return rows[pid].environment.get(ROLE) or (SUPERVISOR if first == pid else ORPHAN)
