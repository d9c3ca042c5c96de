"""How many changes of whole histories the audit names, and which fields the others alter.

    .venv/bin/python -m tests.consumers.audit.corruptions.tally 10000

Each change is made in memory in a copy of one of two histories, and its audit ends at the first violation, so that one
core looks at some hundred thousand changes a day."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest.mock import patch

from millrace.consumers.audit.law import Law
from tests.consumers.audit.corruptions.generator import Change, Generator
from tests.support.whole import Whole, whole

HISTORIES = (0, 3)
"""seeds of whole histories; what the page lists occurs in one of them at least"""
SHOWN_EVERY = 500


class _Named(BaseException):
    """The first violation. No Exception, since laws catch those of rows that they cannot judge."""


def named(history: Whole) -> bool:
    """Whether the audit, with every turn folded again, names any violation."""

    def stop(law: Law, message: str, *records: Any, **ids: Any) -> None:
        raise _Named

    with patch.object(Law, "fail", stop):
        try:
            history.audit()
        except _Named:
            return True
    return False


@cache
def generator(seed: int) -> Generator:
    """The changes of one history."""
    return Generator(whole(seed))


@dataclass
class Tally:
    """Changes by topic and field: all, and those that were not named."""

    made: Counter[str] = field(default_factory=Counter)
    unnamed: Counter[str] = field(default_factory=Counter)
    altered: int = 0
    unseen: list[Change] = field(default_factory=list)

    def add(self, change: Change, *, seen: bool) -> None:
        self.made[_row(change)] += 1
        self.altered += change.what == "alter"
        if not seen:
            self.unnamed[_row(change)] += 1
            self.unseen.append(change)

    def __str__(self) -> str:
        made, unnamed = self.made.total(), self.unnamed.total()
        blind = sum(change.what == "alter" for change in self.unseen)
        lines = [f"{made - unnamed} of {made} changes are named: {1 - unnamed / max(1, made):.2%}"]
        share = 1 - blind / max(1, self.altered)
        lines.append(f"{self.altered - blind} of {self.altered} altered fields are named: {share:.2%}")
        lines += [f"{count:6} of {self.made[row]:5} unnamed: {row}" for row, count in self.unnamed.most_common()]
        return "\n".join(lines)


def _row(change: Change) -> str:
    return f"{change.kind}: {change.listed}"


def changes(count: int) -> Iterator[tuple[Change, bool]]:
    """`count` changes, half of them of each history, and whether each is named."""
    for seed in range(count):
        broken, change = generator(HISTORIES[seed % len(HISTORIES)]).change(seed // len(HISTORIES))
        yield change, named(broken)


def main(count: int) -> None:
    tally = Tally()
    for number, (change, seen) in enumerate(changes(count), 1):
        tally.add(change, seen=seen)
        if number % SHOWN_EVERY == 0 or number == count:
            print(tally, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
