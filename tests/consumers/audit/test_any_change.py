"""Any field of any record of a whole history is altered, any record left out, doubled, exchanged or moved: the audit
names it, or it is one of the few that `docs/audit.md` lists because nothing can tell.

`make audit-changes N=10000` makes that many."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.consumers.audit.corruptions.generator import Change
from tests.consumers.audit.corruptions.tally import HISTORIES, Tally, changes, generator, named

DOCS = Path(__file__).parents[3] / "docs" / "audit.md"
COUNT = int(os.environ.get("MILLRACE_CHANGES") or "400")
ENOUGH = 1000
"""from so many changes on, the share of those that are named is told apart from chance"""
TRIES = 400
SECTION = DOCS.read_text(encoding="utf-8").partition("## What nothing can tell")[2].partition("\n## ")[0]
EXCUSED = re.findall(r"^\| `([^`]+)` \|", SECTION, re.M)
"""fields that nothing can tell, as the page lists them"""


def strange(unseen: list[Change]) -> list[str]:
    """Changes that go unseen although the page does not list them."""
    return [str(change) for change in unseen if change.listed not in EXCUSED]


def tally(count: int) -> Tally:
    found = Tally()
    for change, seen in changes(count):
        found.add(change, seen=seen)
    return found


@pytest.mark.slow
def test_a_few_changes_are_named() -> None:
    assert not strange(tally(40).unseen)


@pytest.mark.slow
@pytest.mark.timeout(36_000)
def test_changes_of_every_field_are_named() -> None:
    found = tally(COUNT)
    assert not strange(found.unseen)
    # Each row of the page is rare: a single one that became common would show here.
    assert found.unnamed.total() <= COUNT * (0.01 if COUNT >= ENOUGH else 0.03), str(found)


def unseen(row: str) -> Change | None:
    """An alteration of a row of the page that the audit does not name."""
    for seed in range(TRIES):
        history = generator(HISTORIES[seed % len(HISTORIES)])
        found = history.deed(*row.split(), seed) if " " in row else history.alteration(row, seed)
        if found is not None and not named(found[0]):
            return found[1]
    return None


@pytest.mark.slow
@pytest.mark.parametrize("row", EXCUSED)
def test_nothing_can_tell_what_the_page_lists(row: str) -> None:
    """A row that is always named has no reason to be there."""
    change = unseen(row)
    assert change is not None
    assert change.listed == row


def test_a_seed_is_one_change() -> None:
    assert str(generator(0).change(7)[1]) == str(generator(0).change(7)[1])
    assert generator(0).change(7)[1] != generator(0).change(8)[1]
