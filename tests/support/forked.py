"""Processes that begin with torch loaded, and what else of others ours load: a server does that once, and each of them
is a fork of the server.

Most of the time of tests that start many processes would go to loading it. Nothing of ours is loaded by the server, so
a fork still begins as a program of its own: with its own environment (which arms fault points), output and directory.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path

LOADED = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
    "transformers.models.qwen2.modeling_qwen2",
    "confluent_kafka.admin",
    "fastavro",
    "fsspec.implementations.local",
    "httpx",
    "msgspec",
    "numpy.typing",
    "psutil",
    "rich.console",
    "tenacity",
]
"""by the server"""
OURS = "millrace"


def server() -> ForkServerContext:
    """How processes begin as forks of the one server that this process has."""
    context = get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    return context


class Fork:
    """`source` run as `python -c` would, in `folder`, its output appended to `log`. What a test needs of Popen."""

    def __init__(self, source: str, environment: Mapping[str, str], folder: Path, log: Path) -> None:
        log.touch()
        self._process = server().Process(target=_run, args=(source, dict(environment), str(folder), str(log)))
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def send_signal(self, what: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, what)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def poll(self) -> int | None:
        """Its exit code, below 0 for a signal; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout_s: float | None = None) -> int:
        """Its exit code once it has ended. TimeoutError when it does not."""
        self._process.join(timeout_s)
        code = self.poll()
        if code is None:
            raise TimeoutError(f"process {self.pid} still runs after {timeout_s} s")
        return code


def _run(source: str, environment: Mapping[str, str], folder: str, log: str) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path.insert(0, folder)
    for name in [name for name in sys.modules if name.partition(".")[0] == OURS]:
        del sys.modules[name]  # that the main module of a benchmark, which a fork repeats, had loaded
    exec(compile(source, "<fork>", "exec"), {"__name__": "__main__"})
