"""A role that SIGTERM ends exits with 143, whatever its closing does; other errors are one line and exit code 1."""

from __future__ import annotations

import subprocess
import sys

import pytest

ROLE = """
import os, signal, threading
import typer
from millrace.apps.cli.context import CommandGroup, become_role
from millrace.infra.errors import BusError

app = typer.Typer(cls=CommandGroup, pretty_exceptions_enable=False)

@app.callback()
def main() -> None: ...

@app.command()
def role() -> None:
    become_role("role")
    try:
        try:
            {moment}
        finally:
            {closing}
    except ValueError:
        pass

app()
"""
TERM = "os.kill(os.getpid(), signal.SIGTERM)"


def run(moment: str, closing: str) -> subprocess.CompletedProcess[str]:
    source = ROLE.format(moment=moment, closing=closing)
    return subprocess.run([sys.executable, "-c", source, "role"], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "closing", ["pass", "raise BusError('no')", "1 / 0", "threading.Thread().join()", "open('/no')"]
)
def test_what_sigterm_ends_exits_so_and_says_what_did_not_close(closing: str) -> None:
    done = run(TERM, closing)
    assert done.returncode == 143
    assert ("does not close well" in done.stderr) == (closing != "pass")
    assert ("Traceback" in done.stderr) == (closing != "pass")


def test_an_end_that_a_library_makes_another_error_of_is_still_the_end() -> None:
    """As pybind11 does to what is raised while its module is being imported: the context is lost."""
    lost = f"exec('try: {TERM}\\nexcept SystemExit: pass'); raise ImportError('SystemExit: 143')"
    done = run(lost, "pass")
    assert done.returncode == 143
    assert "does not close well" in done.stderr


@pytest.mark.parametrize(("moment", "trace"), [("raise BusError('no')", False), ("1 / 0", True)])
def test_an_error_without_it_is_the_process_own(moment: str, *, trace: bool) -> None:
    done = run(moment, "pass")
    assert done.returncode == 1
    assert ("Traceback" in done.stderr) == trace
