"""A fleet of processes that know of each other by the log alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.announced import POLICY
from tests.support.learners import ROOT

RUN = (sys.executable, "-P", "-m", "millrace.apps.cli.main")


def environment_of(broker: str, namespace: str, home: Path, url: str, **more: str) -> dict[str, str]:
    """The settings of a process of this namespace, as its environment."""
    settings = {
        "NAMESPACE": namespace,
        "HOME": str(home),
        "KAFKA__BOOTSTRAP": broker,
        "KAFKA__LOCAL": "false",
        "POLICY__NAME": POLICY,
        "ENGINE__KIND": "inprocess",
        "ENGINE__URL": url,
        **more,
    }
    variables = {f"MILLRACE_{name}": value for name, value in settings.items()}
    return {**os.environ, **variables, "OMP_NUM_THREADS": "1"}


def spawn(command: tuple[str, ...], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a command of Millrace; what it says lies in `log`."""
    with log.open("ab") as output:
        return subprocess.Popen([*RUN, *command], env=environment, stdout=output, stderr=output, cwd=ROOT)
