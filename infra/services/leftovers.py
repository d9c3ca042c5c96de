"""Processes that a killed supervisor or a killed role left behind.

Every process of a deployment inherits MILLRACE_DEPLOYMENT, and every process of a role MILLRACE_ROLE: so its own
workers and engine cores are found even when whoever started them is gone.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from infra.errors import ServiceError

DEPLOYMENT = "MILLRACE_DEPLOYMENT"
ROLE = "MILLRACE_ROLE"


def deployment_id(namespace: str, home: Path) -> str:
    """One deployment on this machine: its namespace and where it keeps its files."""
    return f"{namespace}:{home.absolute()}"


def find(deployment: str, role: str | None = None) -> list[psutil.Process]:
    """Live processes of a deployment (of one role of it), less this one and those that started it."""
    mine = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        if process.pid in mine:
            continue
        try:
            environment = process.environ()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if environment.get(DEPLOYMENT) == deployment and role in (None, environment.get(ROLE)):
            found.append(process)
    return found


def stop(processes: list[psutil.Process], grace_s: float = 10) -> list[int]:
    """SIGTERM to all, SIGKILL to those left after `grace_s` (frozen ones too); gives their ids."""
    for process in processes:
        _signal(process, kill=False)
    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    for process in alive:
        _signal(process, kill=True)
    _, alive = psutil.wait_procs(alive, timeout=10)
    if alive:
        raise ServiceError(f"processes {[p.pid for p in alive]} do not end, not even by SIGKILL: see what holds them")
    return [process.pid for process in processes]


def _signal(process: psutil.Process, kill: bool) -> None:
    try:
        process.kill() if kill else process.terminate()
    except psutil.NoSuchProcess:
        return
