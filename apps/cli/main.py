"""`millrace`: the one command. Every role runs alone, and `up` runs them all.

Invariant: the module of a command is imported when the command is asked for, so that each starts with what it needs."""

from __future__ import annotations

from collections import UserDict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text
from typer import core

from millrace.apps.cli import roles
from millrace.apps.cli.context import HELP_SETTINGS, CommandFlags, CommandGroup, console, entry, flags

HELP = """Millrace trains LLM agents from the stream of their own experience, on Apache Kafka.

First:  [bold]millrace demo[/]  trains a tiny model before your eyes, kills included.

Then:   [bold]millrace init[/], edit millrace.toml, [bold]millrace check[/], [bold]millrace up[/],
[bold]millrace policy create --model DIR[/], [bold]millrace status[/].

Settings come from millrace.toml, overridden by MILLRACE_SECTION__KEY, overridden by --set section.key=value.
"""

START, RUN, FILES, ASK = "Start", "Run", "Train from files", "Ask"
ROLES = "Roles (one process each; `up` runs them all)"
COMMANDS: dict[str, tuple[str, str | None]] = {
    "demo": (START, "deploy:demo"),
    "init": (START, "setup:init"),
    "check": (START, "setup:check"),
    "doctor": (START, "setup:doctor"),
    "config": (START, "setup:config"),
    "up": (RUN, "deploy:up"),
    "down": (RUN, "deploy:down"),
    "status": (RUN, "deploy:status"),
    "drain": (RUN, "engines:drain"),
    "logs": (RUN, "logs:logs"),
    "topics": (RUN, "setup:topics"),
    "sweep": (RUN, "setup:sweep"),
    "registry": (RUN, "registry:registry"),
    "mcp": (RUN, "intake:mcp"),
    "a2a": (RUN, "intake:a2a"),
    "policy": (RUN, "ask:policy"),
    "key": (RUN, "keys:key"),
    "sft": (FILES, "offline:sft"),
    "dpo": (FILES, "offline:dpo"),
    "reward-model": (FILES, "offline:reward_model"),
    "distill": (FILES, "offline:distill"),
    "evaluate": (ASK, "evaluate:evaluate"),
    "audit": (ASK, "ask:audit"),
    "report": (ASK, "ask:report"),
    "why": (ASK, "ask:why"),
    "trajectory": (ASK, "trajectory:trajectory"),
    "lineage": (ASK, "lineage:lineage"),
    "export": (ASK, "export:export"),
    "import": (ASK, "importing:import_"),
    "sql": (ASK, "sql:sql"),
    "replay": (ASK, "replay:replay"),
    "ask": (ASK, "questions:ask"),
    **dict.fromkeys(roles.NAMES, (ROLES, None)),
}
"""command -> its heading in the help; and its function, or the group of its commands, in a module beside this one"""


class CommandsByName(UserDict[str, Any]):
    """Commands, each made when it is looked up."""

    def __getitem__(self, name: str) -> Any:
        if self.data[name] is None:
            self.data[name] = _command(name, *COMMANDS[name])
        return self.data[name]


class MainGroup(CommandGroup):
    """The group of all commands."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = CommandsByName(dict.fromkeys(COMMANDS))


def _command(name: str, panel: str, place: str | None) -> Any:
    app = typer.Typer(rich_markup_mode="rich")
    target = entry(f"millrace.apps.cli.{place}") if place else roles.program(name)
    if isinstance(target, typer.Typer):
        app.add_typer(target, name=name, rich_help_panel=panel)
    else:
        app.command(name, rich_help_panel=panel)(target)
    group: Any = typer.main.get_group(app)
    return group.commands[name]


app = typer.Typer(
    cls=MainGroup,
    help=HELP if core.HAS_RICH else Text.from_markup(HELP).plain,
    rich_markup_mode="rich",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
    context_settings=HELP_SETTINGS,
)


def _version(wants_version: bool) -> None:
    if wants_version:
        from importlib.metadata import version

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
