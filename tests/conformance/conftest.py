"""Processes and references that all cases share.

Processes of a backend start once and rebuild their groups in place for each layout. `MILLRACE_CONFORMANCE=all` runs
every case, else those that are marked `ci` run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import torch

from millrace.trainers.backends.base import Adam
from millrace.trainers.backends.torch.backend import TorchBackend
from tests.conformance.cases import Case, model_state
from tests.conformance.compare import Errors, row
from tests.conformance.run import CLIP, Outcome, steps, train
from tests.support.ranks import Ranks
from tests.support.summary import CONFORMANCE

PROCESSES = 4


def cases() -> list[Case]:
    """The cases of every `cases_*.py` here that this run wants, those of one backend together."""
    found: list[Case] = []
    for file in sorted(Path(__file__).parent.glob("cases_*.py")):
        found += import_module(f"tests.conformance.{file.stem}").CASES
    everything = os.environ.get("MILLRACE_CONFORMANCE") == "all"
    return sorted((c for c in found if c.ci or everything), key=lambda case: (case.backend, case.world, str(case)))


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
def record(record_property: Callable[[str, object], None]) -> Callable[[Case, Errors | str], None]:
    """Adds a row to the table that the run ends with."""
    return lambda case, found: record_property(CONFORMANCE, row(case, found))
