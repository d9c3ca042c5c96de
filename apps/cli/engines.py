"""Commands about the engines of a fleet: `engine join`, `drain`."""

from __future__ import annotations

import os
import time
from typing import Annotated

import typer

from millrace.apps.cli.context import call, console
from millrace.apps.cli.roles import Role, start
from millrace.infra.errors import LookError
from millrace.infra.log.history.kinds import WORKERS
from millrace.infra.log.history.reader import History, left_out
from millrace.infra.workers import ENGINE, drain_request
from millrace.schemas.ids import now_micros
from millrace.schemas.records import WorkerStatus

LOOK_S = 1.0
JOIN = Role(
    "join",
    "Run one inference engine here, and have it join the policy's fleet by the log alone.",
    "It is kept on the newest version and announced, so that every gateway finds it: this machine needs [kafka], the "
    "namespace, the policy's name, an [engine] url that gateways reach, and the weights' directory. Run as many as you "
    "like. Told to end, or by `millrace drain`, it takes no new calls, and ends once it has none.",
    "millrace.consumers.reloader.join:run",
)


def join(context: typer.Context) -> None:
    flags = call(context)
    os.environ.update(flags.environment())  # the engine, which is a child, has the same settings
    start(JOIN, flags.settings())


join.__doc__ = JOIN.help
COMMANDS = {"join": join}
"""of `millrace engine`"""


def drain(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="as `millrace status` calls it, or its url")],
    wait: Annotated[bool, typer.Option("--wait", help="until it has no calls any more, or takes calls again")] = False,
    undo: Annotated[bool, typer.Option("--undo", help="have it take calls again")] = False,
) -> None:
    """Have an engine take no new calls: those that it has come to their end. Its next start takes calls again.

    One that joined (`millrace engine join`) ends then; every other stays, idle, and `--undo` brings it back.

    Example: millrace drain engine-10.0.0.7:8901
    """
    from millrace.infra.connect import connect_now

    settings = call(context).settings()
    with connect_now(settings) as bus:
        history = History(bus, settings.namespace, settings.policy.name)
        engine = find_engine(engines(history), name, settings.policy.name)
        with bus.publisher() as publisher:
            publisher.publish(drain_request(history.names[WORKERS], engine, draining=not undo)).result(30)
        change = "take calls again" if undo else "take no new calls"
        console.print(f"{engine['worker']} was told to {change}", highlight=False)
        if wait:
            console.print(f"{engine['worker']} {_outcome(history, engine, undo)}", highlight=False)


def engines(history: History) -> list[WorkerStatus]:
    """The newest statuses of all engines of the policy, those that lapsed too."""
    records = history.newest_by_key(WORKERS).values()
    rows = [row for record in records if (row := history.row(WORKERS, record, left_out)) is not None]
    return [row.record for row in rows if row["role"] == ENGINE and row["policy"] == history.policy]


def find_engine(statuses: list[WorkerStatus], name: str, policy: str) -> WorkerStatus:
    """The engine of this name or url, of those that serve or drain and whose word holds. Raises LookError."""
    now = now_micros()
    alive = [
        one
        for one in statuses
        if one["expires_at"] > now and (one["draining"] or one["state"] not in ("starting", "stopped"))
    ]
    for one in alive:
        if name in (one["worker"], one["url"]) or name.rstrip("/") == (one["url"] or "").rstrip("/"):
            return one
    names = ", ".join(sorted(one["worker"] for one in alive)) or "none"
    raise LookError(f"no engine {name} of policy {policy} serves now; those that do: {names}")


def _outcome(history: History, engine: WorkerStatus, undo: bool) -> str:
    """What became of a request to this start of an engine, once it is known. Raises LookError for an engine that was
    to take calls again, and is gone."""
    while True:
        key = engine["worker"], engine["incarnation"]
        newest = next((one for one in engines(history) if (one["worker"], one["incarnation"]) == key), None)
        is_gone = newest is None or newest["expires_at"] <= now_micros()
        if undo and is_gone:
            raise LookError(f"{engine['worker']} is gone: start it again, it takes calls then")
        if is_gone or (newest is not None and newest["state"] == "stopped" and not undo):
            return "is drained"
        if undo and newest is not None and not newest["draining"]:
            return "takes calls again"
        time.sleep(LOOK_S)
