"""`millrace lineage`: where a version, a trajectory or a task comes from, and what came of it."""

from __future__ import annotations

from typing import Annotated

import typer

from millrace.apps.cli.context import call, console, entry, reading
from millrace.infra.terminal import put_json


def lineage(
    context: typer.Context,
    subject: Annotated[
        str,
        typer.Argument(
            metavar="VERSION|TRAJECTORY|TASK", help="a version (7, v7, policy@7), or the id of a trajectory or a task"
        ),
    ],
    task: Annotated[
        bool, typer.Option("--task", help="it is the id of a task, even if it looks like a version")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="for programs; names everything")] = False,
) -> None:
    """Show what led to a version, a trajectory or a task, and what came of it.

    Example: millrace lineage 7
    """
    with reading():
        view = entry("millrace.consumers.tell.command:lineage")(call(context).settings(), subject, task=task)
    if as_json:
        put_json(view.json)
    else:
        console.print(view.tree, highlight=False)
