"""`millrace replay rebuild`: topics that stages wrote, made again from what the stages read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from millrace.apps.cli.context import call, entry


def rebuild(
    context: typer.Context,
    topics: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TOPIC]...",
            help="events, trajectories, evaluations, completions, grants, resolutions or dead-letters; all without one",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="write the rebuilt topics there, as segments of an archive", file_okay=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="for programs; lists the differences")] = False,
) -> None:
    """Make topics that stages wrote again from what the stages read, and compare them record by record.

    It reads topics and archive, joins no group and writes nothing to the log. Exit code 1 when a record differs, is
    missing or additional, or cannot be compared."""
    run = entry("millrace.consumers.replay.rebuild.command:run")
    raise typer.Exit(run(call(context).settings(), topics or [], out, as_json=as_json))
