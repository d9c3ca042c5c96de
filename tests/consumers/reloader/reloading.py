"""A reloader as a process of its own, before a real broker."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.forked import Fork
from tests.support.learners import ROOT

RUN = "from millrace.infra.config import load; from millrace.consumers.reloader.serve import run; run(load())"


def spawn(broker: str, namespace: str, policy: str, url: str, log: Path, **more: str) -> Fork:
    """Starts it for the in-process engine at `url`; what it says is appended to `log`. more: settings and fault points
    by what follows MILLRACE_."""
    settings = {
        "NAMESPACE": namespace,
        "KAFKA__BOOTSTRAP": broker,
        "POLICY__NAME": policy,
        "ENGINE__KIND": "inprocess",
        "ENGINE__URL": url,
        **more,
    }
    told = {f"MILLRACE_{name}": value for name, value in settings.items()}
    return Fork(RUN, {**os.environ, "PYTHONPATH": str(ROOT), **told}, ROOT, log)
