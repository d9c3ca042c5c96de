"""`millrace warehouse`, the role, and `millrace warehouse rebuild`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from millrace.apps.cli.context import call, complain, console, entry


def rebuild(
    context: typer.Context,
    forget: Annotated[
        bool, typer.Option("--forget", help="also drop rows of records that neither topics nor archive have")
    ] = False,
) -> None:
    """Make every table anew from topics and archive, and show its rows before and after.

    No warehouse may run meanwhile. Rows whose records neither has any more are not dropped, unless you say so."""
    settings = call(context).settings()
    with complain.status("reading the log"):
        found = entry("millrace.consumers.warehouse.rebuild:rebuild")(settings, forget=forget)
    table = Table("table", "rows before", "rows now", box=None, pad_edge=False)
    for name, (before, now) in found.items():
        table.add_row(name, str(before), str(now))
    console.print(table)


COMMANDS = {"rebuild": rebuild}
"""of the role, by name"""
