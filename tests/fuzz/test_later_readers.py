"""Nothing that lies in any topic ends a later reader of the log with an error that is none of ours: archive, learner,
reloader, audit, report, why, trajectory, lineage, export, and what replays look at before anything is trained.

Laws, for every damaged copy of a real history: a reader ends; a command gives an answer or an error of Millrace's tree,
a role goes on (the learner alone may stop, at a ledger that contradicts itself); the archive gives back what lay there;
each record is one row of the warehouse or is named there as unreadable;
and what a reader says stays the same, to the letter, where all that was added are bytes that nobody can read.

`MILLRACE_FUZZ` says how many inputs, `MILLRACE_FUZZ_SEED` which; a failure names its seed and what was done."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest

from millrace.infra.errors import LedgerError, SchemaError
from tests.fuzz.fuzz_counts import Part
from tests.fuzz.later_readers import ERRORS, READERS, ROLES, UNMOVED, Asked, history, ids
from tests.fuzz.odd_logs import OddLogs, copied
from tests.support.history_log import NS
from tests.support.history_records import POLICY

FUZZ = int(os.environ.get("MILLRACE_FUZZ", "0"))
OTHERS = int(os.environ.get("MILLRACE_FUZZ_SEED") or 0)
COUNT = max(FUZZ // 2000, 24)
"""damaged logs a reader: each costs as much as some thousand requests"""
SLOWER = {"report": 3, "archive": 3, "audit": 2}
"""what takes so many times as long as the others"""
ASKED = 4
"""ids that are asked about in one log"""

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What is passed over is named in logs, thousands of times."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@cache
def logs() -> OddLogs:
    return OddLogs(history().bus, NS, POLICY)


def survives(reader: str, seed: str) -> str:
    """How one reader ends on one damaged log."""
    r = Random(f"{seed} {OTHERS}")
    odd = logs().odd(r)
    asked = Asked(odd.bus, tuple(r.sample(ids(), ASKED)))
    may: tuple[type[Exception], ...] = ERRORS if reader not in ROLES else ()
    if reader == "learner":
        may = (LedgerError,)
    try:
        READERS[reader](asked)
    except SchemaError as error:
        raise AssertionError(f"{reader} {seed}: no answer to what the codec refuses: {error!r}") from error
    except may as error:
        return type(error).__name__
    except Exception as error:
        raise AssertionError(f"{reader} {seed}: {error!r} after {[str(one) for one in odd.done]}") from error
    return "went on"


def undisturbed(reader: str, seed: str) -> None:
    """What a reader says beside bytes that are no records, wherever they lie."""
    r = Random(f"unmoved {seed} {OTHERS}")
    some = tuple(r.sample(ids(), ASKED))
    odd = logs().beside(r, 12)
    try:
        before = repr(READERS[reader](Asked(copied(history().bus), some)))
        after: Any = repr(READERS[reader](Asked(odd.bus, some)))
    except Exception as error:
        raise AssertionError(f"{reader} {seed}: {error!r} after {[str(one) for one in odd.done]}") from error
    assert after == before, f"{reader} {seed}: {[str(one) for one in odd.done]}"


@pytest.mark.parametrize("reader", READERS)
def test_nothing_that_lies_anywhere_ends_a_reader(reader: str) -> None:
    many = max(COUNT // SLOWER.get(reader, 1), 2)
    part = Part(f"later-{reader}", many)
    for seed in range(many):
        part.add(survives(reader, str(seed)))
    part.end()


def warehouse(folder: Path, count: int, *more: str) -> subprocess.CompletedProcess[str]:
    """Damaged histories into tables, in a process of its own."""
    command = [sys.executable, "-m", "tests.fuzz.odd_warehouse", str(folder), str(count), str(OTHERS), *more]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_each_record_is_one_row_or_is_named_in_the_warehouse(tmp_path: Path) -> None:
    ended = warehouse(tmp_path / "tables", max(COUNT // 6, 2))
    assert ended.returncode == 0, ended.stderr[-3000:]
    print(ended.stdout)


def test_a_warehouse_that_names_nothing_is_found(tmp_path: Path) -> None:
    ended = warehouse(tmp_path / "tables", 2, "silent")
    assert ended.returncode != 0
    assert "AssertionError" in ended.stderr


@pytest.mark.parametrize("reader", UNMOVED)
def test_bytes_that_nobody_can_read_change_nothing_that_is_said(reader: str) -> None:
    for seed in range(max(COUNT // 3, 1)):
        undisturbed(reader, str(seed))
