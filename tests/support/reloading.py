"""A reloader as a process of its own, before a real broker."""

from __future__ import annotations

import os
import subprocess
import sys

RUN = "from infra.config import load; from consumers.reloader.serve import run; run(load())"


def spawn(broker: str, namespace: str, policy: str, url: str, **more: str) -> subprocess.Popen[bytes]:
    """Starts it for the in-process engine at `url`. more: settings and fault points by what follows MILLRACE_."""
    settings = {
        "NAMESPACE": namespace,
        "KAFKA__BOOTSTRAP": broker,
        "POLICY__NAME": policy,
        "ENGINE__KIND": "inprocess",
        "ENGINE__URL": url,
        **more,
    }
    told = {f"MILLRACE_{name}": value for name, value in settings.items()}
    return subprocess.Popen([sys.executable, "-c", RUN], env=os.environ | told)
