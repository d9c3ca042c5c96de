"""`millrace warehouse`, the role, and `millrace warehouse rebuild`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from millrace.apps.cli.context import call, complain, console, entry
from millrace.apps.cli.roles import Role, start

NAME = "warehouse"


def commands(role: Role) -> typer.Typer:
    """The role as a command with commands of its own."""
    app = typer.Typer(help=role.help, invoke_without_command=True)

    @app.callback()
    def run(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            start(role, call(context).settings())

    app.command("rebuild")(rebuild)
    return app


def rebuild(
    context: typer.Context,
    forget: Annotated[
        bool, typer.Option("--forget", help="also drop rows of records that the log no longer has")
    ] = False,
) -> None:
    """Make every table anew from the log, and show its rows before and after.

    No warehouse may run meanwhile. Rows whose records the log has forgotten are not dropped, unless you say so."""
    settings = call(context).settings()
    with complain.status("reading the log"):
        found = entry("millrace.consumers.warehouse.rebuild:rebuild")(settings, forget=forget)
    table = Table("table", "rows before", "rows now", box=None, pad_edge=False)
    for name, (before, now) in found.items():
        table.add_row(name, str(before), str(now))
    console.print(table)
