"""`make fuzz` says how far it is every `SHOWN_EVERY_S`, and at its end what each test sent and what came of it.

A run in one process (no -n) shows its counts at the end alone: pytest holds what is written meanwhile."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from pathlib import Path

import pytest

from tests.fuzz.fuzz_counts import FOLDER, line, progress, read

ASKED = int(os.environ.get("MILLRACE_FUZZ", "0"))
SHOWN_EVERY_S = 10.0


class Progress:
    """Lines of the process that starts the others."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._folder = Path(tempfile.mkdtemp(prefix="millrace-fuzz-"))
        os.environ[FOLDER] = str(self._folder)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._show, name="fuzz progress", daemon=True)
        self._began = time.monotonic()

    def pytest_sessionstart(self) -> None:
        if self._config.pluginmanager.hasplugin("dsession"):
            self._thread.start()

    def _show(self) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        assert terminal is not None
        while not self._over.wait(SHOWN_EVERY_S):
            terminal.ensure_newline()
            terminal.write_line(f"fuzz: {progress(read(self._folder), ASKED, time.monotonic() - self._began)}")

    def pytest_sessionfinish(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        parts = read(self._folder)
        spent = time.monotonic() - self._began
        terminalreporter.section("fuzz")
        for name, said in sorted(parts.items()):
            terminalreporter.write_line(line(name, said))
        total = sum(int(str(said["done"])) for said in parts.values())
        terminalreporter.write_line(
            f"{total:,} inputs in {spent:.0f} s ({total / spent:.0f} a second), {ASKED:,} asked for"
        )

    def pytest_unconfigure(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def pytest_configure(config: pytest.Config) -> None:
    if ASKED and FOLDER not in os.environ:  # else this is a worker of a run that counts
        config.pluginmanager.register(Progress(config), "fuzz progress")
