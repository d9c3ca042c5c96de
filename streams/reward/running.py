"""Runs a task's unit tests against an output, each in a private directory of its own.

    judge -> a thread -> `limited` -> namespaces -> command

Invariants: every run ends within its time and a grace, whatever it does; whatever a program does once it runs is a
value of 0, and what fails before that is a labelled failure; nothing that it put anywhere is waited for or followed;
nothing that it wrote is left. In namespaces it cannot reach this process or outlive its run. Where the kernel refuses
them it has this user's rights, and only what stays in its process group ends with it."""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path

import orjson

from millrace.infra.config import RewardTests
from millrace.infra.errors import RewardError
from millrace.schemas.json_values import JsonObject
from millrace.streams.reward import limit_command, run_folders
from millrace.streams.reward.pool import Verdict
from millrace.streams.reward.unit_tests import How, Ran, count, files, program, verdict

log = logging.getLogger(__name__)

LAUNCHER = limit_command.__file__
OUTPUT_BYTES = 16 << 20
"""most bytes of any one file that a run writes"""
REPORT_BYTES = 4 << 20
SPACE_BYTES = 256 << 20
"""of all files of a run in namespaces together, in memory"""
FILES = 256
PROCESSES = 256
GRACE_S = 30.0
"""that a run in namespaces has to start and to end beside its own time"""
TICK_S = 0.01
SAID_BYTES = 4096
TAIL_BYTES = 8000
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
        self._isolated = options.namespaces and not namespace_fault()
        if not self._isolated:
            log.warning("verifier tests: %s", weak(options))
            _hide()
        run_folders.sweep()
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="tests")

    @property
    def version(self) -> str:
        """Names the command and how its end is read."""
        options = self._options
        text = json.dumps([options.command, options.program, options.report])
        return f"tests:{sha256(text.encode()).hexdigest()[:12]}"

    async def judge(self, task: str, output: str, episode: JsonObject) -> Verdict:
        """The verdict on an output. `task` is JSON text. Never raises for what task or output hold."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._judge, task, output)

    def close(self) -> None:
        """Wait for the runs that began."""
        self._threads.shutdown(cancel_futures=True)

    def _judge(self, task: str, output: str) -> Verdict:
        by_report = bool(self._options.report)
        try:
            content = orjson.loads(task)
            fields = content if isinstance(content, dict) else {}
            test_files, least = files(fields, self._options.program), count(fields)
        except orjson.JSONDecodeError:
            return _failure("error: JSONDecodeError")
        except ValueError as failure:
            return _failure(str(failure))
        try:
            ran = self._run(test_files, program(output))
        except Exception as error:  # the files of a task are anybody's; what its program does, `run` answers for
            log.warning("verifier tests: a run could not be made: %s", type(error).__name__)
            return _failure(f"error: {type(error).__name__}")
        if ran.how is How.NO_START:
            log.warning("verifier tests: the command could not be started: %s", ran.output)
        return verdict(ran, by_report=by_report, count=least)

    def _run(self, test_files: Mapping[str, str], source: str) -> Ran:
        options = self._options
        with run_folders.directory() as around:
            work = around / "work"
            for name, text in {options.program: source, **test_files}.items():
                path = work / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, errors="replace")
            return run(
                options.command,
                work,
                timeout_s=self._timeout_s,
                memory_bytes=options.memory_mb << 20,
                report=options.report,
                is_boxed=self._isolated,
            )


@cache
def namespace_fault() -> str:
    """Why programs cannot run in namespaces of their own here, empty where they can. Asked of the kernel once."""
    try:
        with run_folders.directory() as work:
            ran = run((), work, timeout_s=GRACE_S, memory_bytes=1 << 30, report="", is_boxed=True)
    except OSError as error:
        return str(error)
    return "" if (ran.how, ran.status) == (How.EXIT, 0) else ran.output or "they did not start"


def weak(options: RewardTests) -> str:
    """Why and how little programs are kept apart here, in a line; empty where they run in namespaces."""
    why = namespace_fault() if options.namespaces else "[reward.tests] namespaces is off"
    return why and f"programs run with the rights of the reward role and its network, in no namespaces ({why})"


def run(
    command: tuple[str, ...], work: Path, *, timeout_s: float, memory_bytes: int, report: str, is_boxed: bool
) -> Ran:
    """Run a command in `work`. report: name of the file below `work` that it writes one into, empty for none. isolated:
    in namespaces of its own. Raises OSError where nothing could be started."""
    status, child_end = os.pipe()
    token = secrets.token_hex(8)
    with (
        tempfile.TemporaryFile() as output_file,
        tempfile.TemporaryFile() as report_file,
        os.fdopen(status, "rb") as status_file,
    ):
        os.set_blocking(status, False)  # a program may hold the other end for as long as it likes
        options: limit_command.RunLimits = {
            "cpu_s": max(1, round(timeout_s) + 1),
            "memory_bytes": memory_bytes,
            "file_bytes": OUTPUT_BYTES,
            "files": FILES,
            "parent": os.getpid(),
            "token": token,
            "status": child_end,
            "isolated": is_boxed,
            "timeout_s": timeout_s,
            "space_bytes": SPACE_BYTES,
            "processes": PROCESSES,
            "report": report,
            "report_fd": report_file.fileno(),
            "report_bytes": REPORT_BYTES,
        }
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", LAUNCHER, json.dumps(options), *command],
                cwd=work,
                stdin=subprocess.DEVNULL,
                stdout=output_file,
                stderr=subprocess.STDOUT,
                env=environment(work),
                pass_fds=(child_end, report_file.fileno()) if is_boxed else (child_end,),
                start_new_session=True,
            )
        finally:
            os.close(child_end)
        in_time = _await_end(process, timeout_s + GRACE_S if is_boxed else timeout_s)
        how, end = _how(status_file.read(SAID_BYTES) or b"", token, process.returncode, in_time, is_boxed)
        if how is How.NO_START:
            return Ran(how, process.returncode, end, None)
        content = None
        if report:
            content = os.pread(report_file.fileno(), REPORT_BYTES, 0) if is_boxed else _report(work, report)
        return Ran(how, int(end), _tail(output_file.fileno()), content)


def _how(text: bytes, token: str, status: int, in_time: bool, is_boxed: bool) -> tuple[How, str]:
    """How a run ended, and its exit status, or why it did not start. text: by the launcher; in no namespaces perhaps by
    the program too, which does not know the token. status: the launcher's, which is the command's in no namespaces."""
    lines = (line.partition(" ") for line in text.decode(errors="replace").splitlines())
    words = {word: rest for first, _, line in lines if first == token for word, _, rest in (line.partition(" "),)}
    if "refused" in words:
        return How.NO_START, words["refused"]
    if not is_boxed:
        return (How.EXIT if in_time else How.TIMEOUT), str(status)
    if "began" not in words:
        return How.NO_START, "it did not begin"
    if "timeout" in words or not in_time:
        return How.TIMEOUT, str(-signal.SIGKILL)
    return How.EXIT, words.get("ended", str(-signal.SIGKILL))


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


def _await_end(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Wait, end the whole process group, and then the wait: until then nobody else can have the group's number."""
    deadline = time.monotonic() + timeout_s
    try:
        while not (end := os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)):
            if time.monotonic() >= deadline:
                break
            time.sleep(TICK_S)
    finally:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()
    return end is not None


def _tail(descriptor: int) -> str:
    size = os.fstat(descriptor).st_size
    return os.pread(descriptor, TAIL_BYTES, max(0, size - TAIL_BYTES)).decode(errors="replace")


def _report(work: Path, name: str) -> bytes | None:
    """The report, None where there is none. The program may have put anything in its place: it is never waited for."""
    try:
        handle = os.open(work / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        info = os.fstat(handle)
        fits = stat.S_ISREG(info.st_mode) and info.st_size <= REPORT_BYTES
        return os.pread(handle, REPORT_BYTES, 0) if fits else None
    finally:
        os.close(handle)


def _failure(failure: str) -> Verdict:
    return Verdict(None, {}, None, None, failure)


def _hide() -> None:
    """Keep the environment, memory and descriptors of this process from others of its user, who are not root."""
    ctypes.CDLL(None).prctl(limit_command.DUMPABLE, 0, 0, 0, 0)
