"""Commands for a whole deployment on this machine: up, down, status, demo."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.live import Live
from rich.table import Table

from infra.cli.context import call, console, entry
from infra.config import Settings
from infra.services.deployment import Deployment
from infra.services.supervisor import State

COLOURS = {"RUNNING": "green", "STARTING": "yellow", "BACKOFF": "red", "FATAL": "bold red", "EXITED": "dim"}


def up(context: typer.Context) -> None:
    """Start everything that the settings ask for on this machine, and keep it running. Safe to repeat after changes."""
    deployment = _deployment(context)
    stopped = deployment.up()
    if stopped:
        console.print(f"stopped {len(stopped)} processes that a killed supervisor left behind", highlight=False)
    console.print(_processes(deployment.supervisor.states()))
    settings = deployment.settings
    console.print(f"agents: base_url http://{settings.gateway.host}:{settings.gateway.port}/v1", highlight=False)
    console.print(f"logs: {deployment.supervisor.logs}; `millrace status` shows how it goes", highlight=False)


def down(context: typer.Context) -> None:
    """Stop everything that `up` started, and whatever a killed supervisor left."""
    left = _deployment(context).down()
    console.print("stopped" + (f", {len(left)} leftovers too" if left else ""), highlight=False)


def status(
    context: typer.Context,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="stay and follow")] = False,
) -> None:
    """Show the processes of the deployment on this machine. Exit code 1 when one does not run."""
    supervisor = _deployment(context).supervisor
    if watch:
        with Live(console=console, refresh_per_second=2) as live:
            while True:
                live.update(_processes(supervisor.states()))
                time.sleep(0.5)
    states = supervisor.states()
    console.print(_processes(states) if states else "nothing runs: `millrace up` starts it", highlight=False)
    if not states or any(state.state not in ("RUNNING", "EXITED") for state in states):
        raise typer.Exit(1)


def demo(
    seed: Annotated[int, typer.Option(help="of everything random")] = 0,
    short: Annotated[bool, typer.Option("--short", help="ten versions and one kill, no threshold")] = False,
    home: Annotated[Path, typer.Option(help="where it keeps its files", file_okay=False)] = Path(".millrace/demo"),
) -> None:
    """Train a tiny model through the whole loop here, with kills on the way; ends with a page and an audit."""
    raise typer.Exit(entry("infra.demo.run:run")(home=home, seed=seed, short=short))


def _deployment(context: typer.Context) -> Deployment:
    made = call(context)
    settings: Settings = made.settings()
    return Deployment(settings, made.environment())


def _processes(states: list[State]) -> Table:
    table = Table("process", "state", "pid", "up", "says", box=None, pad_edge=False)
    for one in states:
        colour = COLOURS.get(one.state, "default")
        says = "" if one.state == "RUNNING" else one.said
        row = (one.name, f"[{colour}]{one.state.lower()}[/]", str(one.pid or ""), _time(one.up_s) if one.pid else "")
        table.add_row(*row, says)
    return table


def _time(seconds: float) -> str:
    minutes, left = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}"
