"""`millrace logs`: what this machine's processes write."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from time import sleep
from typing import Annotated, NamedTuple

import typer
from rich.text import Text

from millrace.apps.cli.context import call, console
from millrace.infra.errors import ServiceError
from millrace.infra.machine.deployment import Deployment

LOOK_S = 0.5
"""between two looks at logs that are followed"""
ENDING = ".log"
TAIL_BYTES = 1 << 20
"""bytes at the end of a log in which its newest lines are looked for"""


def logs(
    context: typer.Context,
    processes: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROCESS", help="as `status` calls them; `learn` is every learner", show_default=False),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="go on with what comes, until ^C")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="newest lines of each")] = 20,
) -> None:
    """Show the newest lines that the processes of this machine wrote to their logs."""
    flags = call(context)
    folder = Deployment(flags.settings(), flags.environment()).supervisor.logs
    tails = Tails(folder, processes or ())
    if not tails.processes():
        there = ", ".join(Tails(folder).processes())
        raise ServiceError(
            f"there is no such log in {folder}; there are {there}"
            if there
            else f"there are no logs in {folder}: `millrace up` starts what writes them"
        )
    show(tails.last(lines))
    try:
        while follow:
            sleep(LOOK_S)
            show(tails.next_lines())
    except KeyboardInterrupt:
        return


def show(lines: Iterable[LogLine]) -> None:
    """One line of a terminal each, under the name of its process."""
    for line in lines:
        console.print(Text.assemble((f"{line.process}  ", "cyan"), line.text), highlight=False, soft_wrap=True)


class LogLine(NamedTuple):
    """One line of the log of a process."""

    process: str
    text: str


class Tails:
    """The logs in a folder: of every process, or of those whose names, or roles, are given.

    Invariants: a line is given once it is whole, and once; a log that was begun anew (the supervisor does so when one
    is large) is read from its beginning."""

    def __init__(self, folder: Path, names: Collection[str] = ()) -> None:
        self._folder = folder
        self._names = names
        self._read: dict[str, tuple[int, int]] = {}
        """by process: which file was read, and up to which byte"""

    def processes(self) -> list[str]:
        """Those that have a log and are asked for, sorted."""
        names = sorted(path.name.removesuffix(ENDING) for path in self._folder.glob(f"*{ENDING}"))
        return [name for name in names if not self._names or {name, role_of(name)} & {*self._names}]

    def last(self, lines: int) -> Iterator[LogLine]:
        """The newest whole lines of each."""
        for process in self.processes():
            lines_read = list(self._read_on(process, newest=True))
            yield from lines_read[max(0, len(lines_read) - lines) :]

    def next_lines(self) -> Iterator[LogLine]:
        """What was written since the last look, of processes that are new as well."""
        for process in self.processes():
            yield from self._read_on(process)

    def _read_on(self, process: str, *, newest: bool = False) -> Iterator[LogLine]:
        try:
            file = (self._folder / f"{process}{ENDING}").open("rb")
        except FileNotFoundError:
            return  # it is begun anew at this very moment
        with file:
            about = os.fstat(file.fileno())
            number, size = about.st_ino, about.st_size
            former, start = self._read.get(process, (number, 0))
            if former != number or start > size:
                start = 0
            cut = newest and size > TAIL_BYTES
            if cut:
                start = size - TAIL_BYTES
            file.seek(start)
            data, end, _ = file.read(size - start).rpartition(b"\n")
        self._read[process] = (number, start + len(data) + len(end))
        texts = data.decode("utf-8", "replace").split("\n") if end else []
        for text in texts[1:] if cut else texts:
            yield LogLine(process, text.rstrip("\r"))


def role_of(process: str) -> str:
    """`learn` of `learn-0`; a process that is alone in its role is called after it."""
    role, dash, number = process.rpartition("-")
    return role if dash and number.isdigit() else process
