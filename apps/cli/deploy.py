"""Commands for a whole deployment on this machine: up, down, status, demo."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live

from millrace.apps.agreement import check_agreement
from millrace.apps.cli.context import CommandFlags, call, console, entry
from millrace.consumers.tell.status import StatusWatch, learning, processes, silent_workers, steps_ahead, workers, wrong
from millrace.infra.config import FILE, PREFIX, Settings
from millrace.infra.connect import connect
from millrace.infra.engines.kinds import KindName
from millrace.infra.errors import ConfigError, TopicError, UnreachableError
from millrace.infra.local_keys import kafka_options
from millrace.infra.machine.deployment import Deployment
from millrace.infra.machine.supervisor import ProgramState
from millrace.infra.terminal import put_json
from millrace.schemas.ids import now_micros
from millrace.streams.dispatch.announce import asked_by

DEMO = Path(".millrace/demo")
"""where a demo keeps its files, unless told"""
LOOK_S = 0.5
"""between two looks at a deployment that is followed"""
SETTLE_S = 4.0
"""for which `up` looks whether a program fails at its start"""
RETRY_S = 2.0
"""between two looks for topics that are not there yet"""


def up(context: typer.Context) -> None:
    """Start everything that the settings ask for on this machine, and keep it running. Repeated, it starts what is new,
    stops what is no longer asked for, and restarts what reads a setting that changed.
    """
    _check_settings(call(context))
    deployment = _deployment(context)
    check_agreement(deployment.settings)
    leftovers = deployment.up()
    if leftovers:
        console.print(f"stopped {len(leftovers)} processes that a killed supervisor left behind", highlight=False)
    console.print(processes(_first_states(deployment)))
    settings = deployment.settings
    console.print(f"agents: base_url http://{settings.gateway.host}:{settings.gateway.port}/v1", highlight=False)
    logs = f"logs: {deployment.supervisor.logs}; `millrace status` shows how it goes"
    console.print(logs, highlight=False, soft_wrap=True)


def _first_states(deployment: Deployment) -> Sequence[ProgramState]:
    """How the programs are once one of them fails at its start, or `SETTLE_S` have passed."""
    until = time.monotonic() + SETTLE_S
    while True:
        states = deployment.supervisor.states()
        if all(one.state == "RUNNING" for one in states) or any(one.failing for one in states):
            return states
        if time.monotonic() > until:
            return states
        time.sleep(LOOK_S)


def _check_settings(flags: CommandFlags) -> None:
    """Raises ConfigError where nobody said what to start: a typing error in a wrong folder starts no broker."""
    has_flags = flags.flags or any(name.upper().startswith(PREFIX) for name in os.environ)
    if flags.path.exists() or has_flags:
        return
    demo = flags.path.absolute().parent / DEMO
    hint = f" The demo's lie in {DEMO}: `cd {DEMO}` first." if (demo / FILE).exists() else ""
    raise ConfigError(
        f"There is no {flags.path} here, so nothing says what to start: `millrace init` writes one.{hint}"
    )


def down(context: typer.Context) -> None:
    """Stop everything that `up` started, and whatever a killed supervisor left."""
    leftovers = _deployment(context).down()
    console.print("stopped" + (f", {len(leftovers)} leftovers too" if leftovers else ""), highlight=False)


def status(
    context: typer.Context,
    follow: Annotated[bool, typer.Option("--watch", "-w", help="stay and follow, until ^C")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
) -> None:
    """Show how the policy does, who is alive anywhere, this machine's processes, and what a deployment that is still
    starting waits for. Exit code 1 when there is no such policy, when nothing runs here, or when a process does not
    run, keeps ending, or runs without a word in the log; 0 while all that is missing is on its way.
    """
    deployment = _deployment(context)
    with ExitStack() as stack:
        watch = _watch(deployment.settings, stack)
        if follow:
            _follow(deployment, watch, stack)
            return
        states = deployment.supervisor.states()
        silences = {} if isinstance(watch, str) else silent_workers(watch, now_micros(), states)
        if as_json:
            put_json(_plainly(deployment, watch, states, silences))
        else:
            console.print(_status(deployment, watch), highlight=False)
    if wrong(watch, states, silences):
        raise typer.Exit(1)


def _plainly(
    deployment: Deployment, watch: StatusWatch | str, states: Sequence[ProgramState], silences: Mapping[str, float]
) -> dict[str, object]:
    """What `status` shows, for programs."""
    learning_of = None
    if not isinstance(watch, str):
        now = now_micros()
        learning_of = {
            "version": watch.version if watch.began else None,
            "reward": watch.rewards[-1] if watch.rewards else None,
            "waiting": watch.lag,
            "groups": dict(watch.resolved),
            "in_force": dict(watch.in_force),
            "workers": {name: one for name, one in watch.workers.items() if one["expires_at"] > now},
            "silent": dict(silences),
        }
    return {
        "policy": deployment.settings.policy.name,
        "log": watch if isinstance(watch, str) else "ok",
        "awaited": steps_ahead(watch, states, now_micros()),
        "learning": learning_of,
        "processes": [asdict(one) for one in states],
    }


def _follow(deployment: Deployment, watch: StatusWatch | str, stack: ExitStack) -> None:
    """Until ^C, which is noticed between two looks: an exception raised anywhere can be lost in a client's callback."""
    over = threading.Event()
    former = signal.signal(signal.SIGINT, lambda *_: over.set())
    try:
        with Live(console=console, refresh_per_second=2) as live:
            while not over.is_set():
                live.update(_status(deployment, watch))
                if isinstance(watch, str):
                    over.wait(RETRY_S)
                    watch = _watch(deployment.settings, stack)
                    continue
                next_look = time.monotonic() + LOOK_S
                while not over.is_set() and (rest_s := next_look - time.monotonic()) > 0:
                    watch.poll(rest_s)
    finally:
        signal.signal(signal.SIGINT, former)


def demo(
    seed: Annotated[int, typer.Option(help="of everything random")] = 0,
    is_short: Annotated[bool, typer.Option("--short", help="ten versions and one kill, no threshold")] = False,
    engine: Annotated[KindName | None, typer.Option(help="kind of engine that samples")] = None,
    home: Annotated[
        Path, typer.Option(help="where it keeps its files", file_okay=False, envvar=f"{PREFIX}HOME")
    ] = DEMO,
) -> None:
    """Train a tiny model through the whole loop here, with kills on the way; ends with a page and an audit."""
    raise typer.Exit(entry("millrace.apps.demo.run:run")(home=home, seed=seed, is_short=is_short, kind=engine))


def _deployment(context: typer.Context) -> Deployment:
    flags = call(context)
    settings = flags.settings()
    learners = entry("millrace.consumers.learner.group.layouts:learner_count")(settings.learner)
    deployment_settings = settings.model_copy(
        update={"learner": settings.learner.model_copy(update={"learners": learners})}
    )
    return Deployment(deployment_settings, flags.environment())


def _watch(settings: Settings, stack: ExitStack) -> StatusWatch | str:
    """A reader of the policy's topics, or why there is none."""
    from millrace.infra.log.kafka.entry import contact

    policy, broker = settings.policy.name, settings.kafka.bootstrap

    try:
        contact(settings.kafka.bootstrap, kafka_options(settings), 2)
    except UnreachableError:
        return f"no broker answers at {broker}: `millrace up` starts what is local"
    bus = connect(settings)
    try:
        watch = StatusWatch(bus, settings.namespace, settings.policy.name)
    except TopicError:
        bus.close()
        return (
            f"policy {policy} has no topics in {settings.namespace} at {broker}: `millrace up` or `topics` makes them"
        )
    stack.callback(bus.close)
    stack.callback(watch.close)
    watch.catch_up()
    return watch


def _status(deployment: Deployment, watch: StatusWatch | str) -> RenderableType:
    states = deployment.supervisor.states()
    parts: list[RenderableType] = []
    coming = steps_ahead(watch, states, now_micros())
    if isinstance(watch, str):
        parts.append(watch)
    else:
        log_settings = asked_by(deployment.settings)
        parts += [learning(watch, settings=log_settings), "", workers(watch, now_micros(), states)]
    if coming:
        parts += ["", "awaited: " + "; ".join(coming)]
    parts += ["", processes(states) if states else _absence(deployment.supervisor.left_alone())]
    return Group(*parts)


def _absence(count: int) -> str:
    """What to say where no supervisor answers and so many processes run all the same."""
    if not count:
        return "nothing runs here"
    return f"the supervisor is gone, and {count} processes run that nobody starts again: `millrace up` brings all back"
