"""The progress of a learner for people: a live line on a terminal, folded where it is narrow; elsewhere (a log) a line
a version.

Versions that lost groups or left the weights unchanged keep a line of their own on a terminal too.
"""

from __future__ import annotations

from typing import Self

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

from millrace.consumers.learner.version.metrics import line
from millrace.schemas.records import LedgerEntry


class LearnerScreen:
    """Shows versions of `policy` as they are committed. `versions`: how many there will be, 0 where nobody knows. Use
    it as a context."""

    def __init__(self, policy: str, versions: int, console: Console) -> None:
        self._console = console
        self._live = Progress(
            SpinnerColumn(),
            TimeElapsedColumn(),
            *((MofNCompleteColumn(),) if versions else ()),
            TextColumn("{task.description}", markup=False, table_column=Column(overflow="fold")),
            console=console,
            disable=not console.is_terminal,
        )
        self._policy = policy
        self._task = self._live.add_task(f"{policy}: no version yet", total=versions or None)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, entry: LedgerEntry) -> None:
        """The line of a version that was committed; the time beside it begins anew."""
        said = line(entry)
        self._live.reset(self._task, description=f"{self._policy} {said}", completed=entry["version"])
        if self._live.disable or entry["unchanged"] or any(group["lost"] is not None for group in entry["groups"]):
            self._console.print(said, highlight=False, markup=False, soft_wrap=True)
