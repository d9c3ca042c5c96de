"""The fuzz of the later readers finds a guard that is missing, within few inputs.

Each mutant takes one guard away and leaves everything else as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from millrace.infra.log.archive.filling import Filler
from millrace.infra.log.history.reader import History
from millrace.infra.log.history.rows import row_of
from millrace.schemas import codec
from tests.fuzz.later_readers import READERS, UNMOVED
from tests.fuzz.test_later_readers import quiet, survives, undisturbed

__all__ = ["quiet"]

pytestmark = pytest.mark.slow

INPUTS = 100
"""at most: it ends with the first that finds it"""
Mutant = tuple[type, str, Callable[..., Any]]


def _reading_all(self: History, kind: str, record: Any, unreadable: object = None) -> Any:
    """`History.row` for records that can be read."""
    return row_of(kind, record, self.resolve)


def _claiming_all(self: Filler, record: Any) -> tuple[str, None]:
    """`Filler._behind` for records of ours, of which none is a claim."""
    assert codec.name_of(record.value or b"") != "Claim"
    return "", None


READS: Mutant = (History, "row", _reading_all)
MUTANTS: dict[str, Mutant] = {**dict.fromkeys(READERS, READS), "archive": (Filler, "_behind", _claiming_all)}


def inputs(reader: str) -> None:
    for seed in range(INPUTS):
        survives(reader, str(seed))
        if reader in UNMOVED:
            undisturbed(reader, str(seed))


@pytest.mark.parametrize("reader", READERS)
def test_a_reader_without_its_guard_is_found(reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    holder, guard, instead = MUTANTS[reader]
    monkeypatch.setattr(holder, guard, instead)
    with pytest.raises(AssertionError, match=r"after|no answer"):
        inputs(reader)
