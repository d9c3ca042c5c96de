"""Runs a task's unit tests against an output, each in a private directory of its own.

Invariants: every run ends within its time, and everything in its process group with it; it sees no variable of this
process's environment; nothing that it wrote is left. It is no sandbox: what it runs has this user's rights."""

from __future__ import annotations

import asyncio
import json
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson

from millrace.infra.config import RewardTests
from millrace.infra.errors import RewardError
from millrace.streams.reward import limited
from millrace.streams.reward.pool import Verdict
from millrace.streams.reward.unit_tests import How, Ran, files, program, verdict

LAUNCHER = limited.__file__
OUTPUT_BYTES = 16 << 20
"""most bytes of any one file that a run writes"""
REPORT_BYTES = 4 << 20
FILES = 256
PRINTED = 8000
"""bytes at the end of what a run printed that are read"""


class UnitTests:
    """The tests of `[reward.tests]`: `workers` runs at once."""

    def __init__(self, options: RewardTests, *, workers: int, timeout_s: float) -> None:
        """timeout_s bounds each run. Raises RewardError where the command cannot be run."""
        if not options.command:
            raise RewardError("verifier tests: set command under [reward.tests]")
        if shutil.which(options.command[0]) is None:
            raise RewardError(f"verifier tests: there is no command {options.command[0]!r} here")
        self._options = options
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="tests")

    @property
    def version(self) -> str:
        """Names the command and how its end is read."""
        options = self._options
        said = json.dumps([options.command, options.program, options.report])
        return f"tests:{sha256(said.encode()).hexdigest()[:12]}"

    async def judge(self, task: str, output: str, episode: dict[str, Any]) -> Verdict:
        """The verdict on an output. `task` is JSON text. Never raises for what task or output hold."""
        try:
            found = orjson.loads(task)
            given = files(found if isinstance(found, dict) else {}, self._options.program)
        except orjson.JSONDecodeError:
            return Verdict(None, {}, None, None, "error: JSONDecodeError")
        except ValueError as failure:
            return Verdict(None, {}, None, None, str(failure))
        try:
            ran = await asyncio.get_running_loop().run_in_executor(self._threads, self._run, given, program(output))
        except OSError as error:
            return Verdict(None, {}, None, None, f"error: {type(error).__name__}")
        return verdict(ran, reported=bool(self._options.report))

    def close(self) -> None:
        """Wait for the runs that began."""
        self._threads.shutdown(cancel_futures=True)

    def _run(self, given: Mapping[str, str], source: str) -> Ran:
        options = self._options
        with tempfile.TemporaryDirectory(prefix="millrace-tests-", ignore_cleanup_errors=True) as private:
            work = Path(private) / "work"
            for name, text in {options.program: source, **given}.items():
                path = work / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, errors="replace")
            return run(
                options.command,
                work,
                Path(private) / "printed",
                timeout_s=self._timeout_s,
                memory_bytes=options.memory_mb << 20,
                report=options.report,
            )


def run(
    command: tuple[str, ...], work: Path, printed: Path, *, timeout_s: float, memory_bytes: int, report: str
) -> Ran:
    """Run a command in `work`; what it prints goes to the file `printed`. report: name of the file below `work` that
    it writes one into, empty for none."""
    limits = {
        "cpu_s": max(1, round(timeout_s) + 1),
        "memory_bytes": memory_bytes,
        "file_bytes": OUTPUT_BYTES,
        "files": FILES,
    }
    status, theirs = os.pipe()
    try:
        try:
            with printed.open("wb") as out:
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", LAUNCHER, json.dumps(limits), str(theirs), *command],
                    cwd=work,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=environment(work),
                    pass_fds=(theirs,),
                    start_new_session=True,
                )
        finally:
            os.close(theirs)
        in_time = _ended(process, timeout_s)
        if os.read(status, 1):
            return Ran(How.NOT_STARTED, process.returncode, "", None)
    finally:
        os.close(status)
    how = How.EXITED if in_time else How.TIMEOUT
    return Ran(how, process.returncode, _tail(printed), _report(work, report) if report else None)


def environment(work: Path) -> dict[str, str]:
    """What a run sees of this process's environment: where programs are, and nothing else."""
    path = os.environ.get("PATH", os.defpath)
    return {
        "PATH": path,
        "HOME": str(work),
        "TMPDIR": str(work),
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def _ended(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Wait, end the whole process group, and then the wait: until then nobody else can have the group's number."""
    handle = os.pidfd_open(process.pid)
    try:
        deadline = time.monotonic() + timeout_s
        in_time = bool(select.select([handle], [], [], max(0.0, deadline - time.monotonic()))[0])
        os.killpg(process.pid, signal.SIGKILL)
    finally:
        os.close(handle)
        process.wait()
    return in_time


def _tail(printed: Path) -> str:
    with printed.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - PRINTED))
        return file.read(PRINTED).decode(errors="replace")


def _report(work: Path, name: str) -> bytes | None:
    """The report, None where there is none. The program may have put anything in its place: it is never waited for."""
    try:
        handle = os.open(work / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(handle)
        return file.read() if stat.S_ISREG(found.st_mode) and found.st_size <= REPORT_BYTES else None
