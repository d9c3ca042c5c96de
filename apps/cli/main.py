"""`millrace`: the one command. Every role runs alone, and `up` runs them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from millrace.apps.cli import (
    archive,
    ask,
    deploy,
    evaluate,
    export,
    importing,
    intake,
    lineage,
    logs,
    offline,
    questions,
    replay,
    roles,
    setup,
    sql,
    trajectory,
    warehouse,
)
from millrace.apps.cli.context import CommandFlags, CommandGroup, console, flags

HELP = """Millrace trains LLM agents from the stream of their own experience, on Apache Kafka.

First:  [bold]millrace demo[/]  trains a tiny model before your eyes, kills included.

Then:   [bold]millrace init[/], edit millrace.toml, [bold]millrace check[/], [bold]millrace up[/],
        [bold]millrace policy create --model DIR[/], [bold]millrace status[/].

Settings come from millrace.toml, overridden by MILLRACE_SECTION__KEY, overridden by --set section.key=value.
"""

app = typer.Typer(
    cls=CommandGroup,
    help=HELP,
    rich_markup_mode="rich",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

START, RUN, FILES, ASK = "Start", "Run", "Train from files", "Ask"
ROLES = "Roles (one process each; `up` runs them all)"
GROUPS: Mapping[str, Mapping[str, Callable[..., None]]] = {"archive": archive.COMMANDS, "warehouse": warehouse.COMMANDS}
"""roles whose commands have commands of their own"""

app.command("demo", rich_help_panel=START)(deploy.demo)
app.command("init", rich_help_panel=START)(setup.init)
app.command("check", rich_help_panel=START)(setup.check)
app.command("doctor", rich_help_panel=START)(setup.doctor)
app.command("config", rich_help_panel=START)(setup.config)
app.command("up", rich_help_panel=RUN)(deploy.up)
app.command("down", rich_help_panel=RUN)(deploy.down)
app.command("status", rich_help_panel=RUN)(deploy.status)
app.command("logs", rich_help_panel=RUN)(logs.logs)
app.command("topics", rich_help_panel=RUN)(setup.topics)
app.command("sweep", rich_help_panel=RUN)(setup.sweep)
app.command("mcp", rich_help_panel=RUN)(intake.mcp)
app.command("a2a", rich_help_panel=RUN)(intake.a2a)
app.add_typer(ask.policy, name="policy", rich_help_panel=RUN)
app.command("sft", rich_help_panel=FILES)(offline.sft)
app.command("dpo", rich_help_panel=FILES)(offline.dpo)
app.command("reward-model", rich_help_panel=FILES)(offline.reward_model)
app.command("distill", rich_help_panel=FILES)(offline.distill)
app.command("evaluate", rich_help_panel=ASK)(evaluate.evaluate)
app.command("audit", rich_help_panel=ASK)(ask.audit)
app.command("report", rich_help_panel=ASK)(ask.report)
app.command("why", rich_help_panel=ASK)(ask.why)
app.add_typer(replay.replay, name="replay", rich_help_panel=ASK)
app.command("trajectory", rich_help_panel=ASK)(trajectory.trajectory)
app.command("lineage", rich_help_panel=ASK)(lineage.lineage)
app.command("export", rich_help_panel=ASK)(export.export)
app.command("import", rich_help_panel=ASK)(importing.import_)
app.add_typer(questions.ask, name="ask", rich_help_panel=ASK)
app.command("sql", rich_help_panel=ASK)(sql.sql)
for role in roles.ROLES:
    if role.name in GROUPS:
        app.add_typer(roles.group(role, GROUPS[role.name]), name=role.name, rich_help_panel=ROLES)
    else:
        app.command(role.name, help=role.help, rich_help_panel=ROLES)(roles.command(role))


def _version(asked: bool) -> None:
    if asked:
        console.print(version("millrace"))
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option(help="settings file; default: millrace.toml here")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="override a setting; may be repeated")
    ] = None,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="show it")] = False,
) -> None:
    context.obj = CommandFlags(config, flags(overrides or []))


if __name__ == "__main__":
    app(prog_name="millrace")
