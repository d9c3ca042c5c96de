"""Processes and references that all cases share, and the table at the end.

Processes of a backend start once and rebuild their groups in place for each layout. `MILLRACE_CONFORMANCE=all` runs
every case, else those that are marked `ci` run; `MILLRACE_CONFORMANCE_TABLE` names a file for the table."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import torch

from tests.support.conformance.cases import Case, model_state
from tests.support.conformance.compare import Errors, table
from tests.support.conformance.run import CLIP, Outcome, steps, train
from tests.support.ranks import Ranks
from trainers.backends.fsdp import Adam, TorchBackend

PROCESSES = 4
Rows = list[tuple[Case, Errors | str]]
ROWS: Rows = []


def cases() -> list[Case]:
    """The cases of every `cases_*.py` here that this run wants, those of one backend together."""
    found: list[Case] = []
    for file in sorted(Path(__file__).parent.glob("cases_*.py")):
        found += import_module(f"tests.conformance.{file.stem}").CASES
    everything = os.environ.get("MILLRACE_CONFORMANCE") == "all"
    return sorted((case for case in found if case.ci or everything), key=lambda case: (case.backend, case.world))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", cases(), ids=str)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[str], Ranks]]:
    """The processes of a backend; those of the backend before end."""
    running: dict[str, Ranks] = {}

    def of(backend: str) -> Ranks:
        if backend not in running:
            for other in list(running):
                running.pop(other).__exit__()
            running[backend] = Ranks(PROCESSES).__enter__()
        return running[backend]

    yield of
    for other in running.values():
        other.__exit__()


@pytest.fixture(scope="session")
def reference() -> Callable[[str], Outcome]:
    """What one process of the torch backend computes for a model."""

    @cache
    def of(model: str) -> Outcome:
        backend = TorchBackend(Adam(weight_decay=0.01, clip=CLIP), device="cpu")
        return train(backend, 0, 1, None, model_state(model), steps())

    return of


@pytest.fixture
def record() -> Callable[[Case, Errors | str], None]:
    """Adds a row to the table."""
    return lambda case, found: ROWS.append((case, found))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not ROWS:
        return
    text = table(ROWS)
    terminalreporter.write_sep("=", "conformance with one process of torch")
    terminalreporter.write_line(text)
    if target := os.environ.get("MILLRACE_CONFORMANCE_TABLE"):
        Path(target).write_text(text)
