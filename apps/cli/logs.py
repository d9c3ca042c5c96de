"""`millrace logs`: what this machine's processes write."""

from __future__ import annotations

from collections.abc import Iterable
from time import sleep
from typing import Annotated

import typer
from rich.text import Text

from millrace.apps.cli.context import call, console
from millrace.infra.errors import ServiceError
from millrace.infra.machine.deployment import Deployment
from millrace.infra.machine.tails import LogLine, Tails

LOOK_S = 0.5
"""between two looks at logs that are followed"""


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
    made = call(context)
    folder = Deployment(made.settings(), made.environment()).supervisor.logs
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
            show(tails.new())
    except KeyboardInterrupt:
        return


def show(found: Iterable[LogLine]) -> None:
    """One line of a terminal each, under the name of its process."""
    for line in found:
        console.print(Text.assemble((f"{line.process}  ", "cyan"), line.text), highlight=False, soft_wrap=True)
