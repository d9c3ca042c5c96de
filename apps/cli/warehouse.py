"""`millrace warehouse`, the role, `millrace warehouse rebuild` and `millrace warehouse take`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated

import typer

from millrace.apps.cli.context import call, complain, console, entry
from millrace.infra.terminal import RowTable


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
        counts = entry("millrace.consumers.warehouse.rebuild:rebuild")(settings, forget=forget)
    table = RowTable("table", "rows before", "rows now", box=None, pad_edge=False)
    for name, (before, now) in counts.items():
        table.add_row(name, str(before), str(now))
    console.print(table)


def take(
    context: typer.Context,
    namespace: Annotated[
        list[str], typer.Option("--from", metavar="NAMESPACE", help="whose rows to delete; may be repeated")
    ],
) -> None:
    """Make the tables of a server this deployment's alone: the rows of other namespaces are deleted there.

    A server holds one namespace. Rows of another one, which no deployment needs any more, are in the way of this one:
    name each whose rows may go. Its topics and its archive stay as they are."""
    deletions = entry("millrace.consumers.warehouse.open_store:take_server")(call(context).settings(), namespace)
    for name, rows in deletions.items():
        console.print(f"{rows:,} rows of namespace {name} are deleted", highlight=False)


COMMANDS: Mapping[str, Callable[..., None]] = {"rebuild": rebuild, "take": take}
"""of the role, by name"""
