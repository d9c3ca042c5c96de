"""Commands for a whole deployment on this machine: up, down, status, demo."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live

from infra.bus.connect import connect
from infra.cli.context import call, console, entry
from infra.config import Settings
from infra.errors import TopicError, UnreachableError
from infra.services.deployment import Deployment
from infra.view.tables import learning, processes, workers
from infra.view.watch import Watch
from schemas.ids import now_micros

LOOK_S = 0.5
"""between two looks at a deployment that is followed"""
RETRY_S = 2.0
"""between two looks for topics that are not there yet"""


def up(context: typer.Context) -> None:
    """Start everything that the settings ask for on this machine, and keep it running. Repeated, it starts what is new,
    stops what is no longer asked for, and restarts what reads a setting that changed.
    """
    deployment = _deployment(context)
    stopped = deployment.up()
    if stopped:
        console.print(f"stopped {len(stopped)} processes that a killed supervisor left behind", highlight=False)
    console.print(processes(deployment.supervisor.states()))
    settings = deployment.settings
    console.print(f"agents: base_url http://{settings.gateway.host}:{settings.gateway.port}/v1", highlight=False)
    logs = f"logs: {deployment.supervisor.logs}; `millrace status` shows how it goes"
    console.print(logs, highlight=False, soft_wrap=True)


def down(context: typer.Context) -> None:
    """Stop everything that `up` started, and whatever a killed supervisor left."""
    left = _deployment(context).down()
    console.print("stopped" + (f", {len(left)} leftovers too" if left else ""), highlight=False)


def status(
    context: typer.Context,
    follow: Annotated[bool, typer.Option("--watch", "-w", help="stay and follow, until ^C")] = False,
) -> None:
    """Show how the policy does, who is alive anywhere, and this machine's processes. Exit code 1 when one does not
    run.
    """
    deployment = _deployment(context)
    with ExitStack() as held:
        watch = _watch(deployment.settings, held)
        if follow:
            _follow(deployment, watch, held)
            return
        console.print(_status(deployment, watch), highlight=False)
    states = deployment.supervisor.states()
    if not states or any(state.state not in ("RUNNING", "STARTING", "EXITED") for state in states):
        raise typer.Exit(1)


def _follow(deployment: Deployment, watch: Watch | str, held: ExitStack) -> None:
    """Until ^C, which is noticed between two looks: an exception raised anywhere can be lost in a client's callback."""
    over = threading.Event()
    former = signal.signal(signal.SIGINT, lambda *_: over.set())
    try:
        with Live(console=console, refresh_per_second=2) as live:
            while not over.is_set():
                live.update(_status(deployment, watch))
                if isinstance(watch, str):
                    over.wait(RETRY_S)
                    watch = _watch(deployment.settings, held)
                    continue
                next_look = time.monotonic() + LOOK_S
                while not over.is_set() and (left := next_look - time.monotonic()) > 0:
                    watch.poll(left)
    finally:
        signal.signal(signal.SIGINT, former)


def demo(
    seed: Annotated[int, typer.Option(help="of everything random")] = 0,
    short: Annotated[bool, typer.Option("--short", help="ten versions and one kill, no threshold")] = False,
    home: Annotated[Path, typer.Option(help="where it keeps its files", file_okay=False)] = Path(".millrace/demo"),
) -> None:
    """Train a tiny model through the whole loop here, with kills on the way; ends with a page and an audit."""
    raise typer.Exit(entry("infra.demo.run:run")(home=home, seed=seed, short=short))


def _deployment(context: typer.Context) -> Deployment:
    made = call(context)
    settings = made.settings()
    learners = entry("consumers.learner.layouts:started")(settings.learner)
    whole = settings.model_copy(update={"learner": settings.learner.model_copy(update={"learners": learners})})
    return Deployment(whole, made.environment())


def _watch(settings: Settings, held: ExitStack) -> Watch | str:
    """A reader of the policy's topics, or why there is none."""
    from infra.bus.kafka_entry import contact

    policy, broker = settings.policy.name, settings.kafka.bootstrap

    try:
        contact(settings.kafka.bootstrap, settings.kafka.client_options(), 2)
    except UnreachableError:
        return f"no broker answers at {broker}: `millrace up` starts what is local"
    bus = connect(settings)
    try:
        watch = Watch(bus, settings.namespace, settings.policy.name)
    except TopicError:
        bus.close()
        return (
            f"policy {policy} has no topics in {settings.namespace} at {broker}: `millrace up` or `topics` makes them"
        )
    held.callback(bus.close)
    held.callback(watch.close)
    watch.catch_up()
    return watch


def _status(deployment: Deployment, watch: Watch | str) -> RenderableType:
    parts: list[RenderableType] = []
    if isinstance(watch, str):
        parts.append(watch)
    else:
        parts += [learning(watch), "", workers(watch, now_micros())]
    states = deployment.supervisor.states()
    parts += ["", processes(states) if states else "nothing runs here"]
    return Group(*parts)
