"""One child process with a log: start, wait, stop, kill. What the local services share.

Invariant: a service is fully described by `command` and `environment`, so that a supervisor can run it as well as a
test.
"""

from __future__ import annotations

import os
import signal
import subprocess
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Self

from millrace.infra.errors import ServiceError
from millrace.infra.process.net import wait_until

UNSET = ("PYTHONDONTWRITEBYTECODE",)
"""Variables that no service may inherit: without byte code every start of an engine is a first start."""


class Service(ABC):
    """A local service whose files live in `home`; `home/<name>.log` holds what it prints."""

    name: str

    def __init__(self, home: Path) -> None:
        self.home = home.absolute()
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def prepare(self) -> None:
        """Everything that must exist before `command` runs. Safe to repeat, also after a kill."""

    @abstractmethod
    def command(self) -> list[str]:
        """The command line that runs the service in the foreground. SIGTERM ends it."""

    def environment(self) -> dict[str, str]:
        """Variables the service needs on top of what it inherits."""
        return {}

    @abstractmethod
    def is_ready(self) -> bool:
        """Whether it serves now."""

    @property
    def log(self) -> Path:
        return self.home / f"{self.name}.log"

    @property
    def pid(self) -> int | None:
        """Process id of what `start` began, None when it is not running."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def start(self, timeout_s: float) -> None:
        """Prepare, start and wait. The service outlives neither `stop` nor `kill`, but it does outlive its starter."""
        self.home.mkdir(parents=True, exist_ok=True)
        self.prepare()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command(),
                env=inherited_environment() | self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.home,
                start_new_session=True,
            )
        self.wait(timeout_s)

    def wait(self, timeout_s: float) -> None:
        """Wait until it serves. Raises ServiceError with the end of its log when it died instead."""

        def is_ready() -> bool:
            if self._process and self._process.poll() is not None:
                tail = self.log.read_text(errors="replace")[-2000:]
                raise ServiceError(f"{self.name} ended with code {self._process.returncode}; {self.log} ends:\n{tail}")
            return self.is_ready()

        wait_until(is_ready, f"{self.name} ({self.log})", timeout_s)

    def stop(self, timeout_s: float = 20) -> None:
        """SIGTERM, then SIGKILL when that does not end it in time. Safe to repeat."""
        if self._process:
            self._process.terminate()
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.kill()
            self._process = None

    def kill(self) -> None:
        """kill -9 of the service and its own children, and wait until it is gone."""
        if self._process:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __enter__(self) -> Self:
        return self


def inherited_environment() -> dict[str, str]:
    """This process's environment, less what a service must not inherit."""
    return {name: value for name, value in os.environ.items() if name not in UNSET}
