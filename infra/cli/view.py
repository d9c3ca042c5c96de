"""What `status` shows: how the policy does and which workers anywhere are alive, from the topics; and this machine's
processes, from the supervisor."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from infra.demo.watch import Watch
from infra.services.supervisor import State
from schemas.ids import Micros

COLOURS = {"RUNNING": "green", "STARTING": "yellow", "BACKOFF": "red", "FATAL": "bold red", "EXITED": "dim"}


def processes(states: Sequence[State]) -> Table:
    """One row a program of this machine."""
    table = Table("process", "state", "pid", "up", "says", box=None, pad_edge=False)
    for one in states:
        state = Text(one.state.lower(), COLOURS.get(one.state, ""))
        up = duration(one.up_s) if one.pid else ""
        table.add_row(one.name, state, str(one.pid or ""), up, "" if one.state == "RUNNING" else Text(one.said))
    return table


def learning(watch: Watch) -> Table:
    """How the policy does."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("policy", watch.policy)
    table.add_row("version", str(watch.version))
    if watch.versions:
        last = watch.versions[-1]
        metrics = last["metrics"]
        table.add_row("reward", f"{metrics.get('reward_mean', 0.0):.3f}")
        most = metrics.get("staleness_max", 0.0)
        table.add_row("staleness", f"mean {metrics.get('staleness_mean', 0.0):.2f}, max {most:.0f} versions")
        table.add_row(
            "learners", ", ".join(f"{share['member']}: {share['samples']} samples" for share in last["ranks"])
        )
    table.add_row("waiting", f"{watch.lag} ready groups")
    groups = ", ".join(f"{count} {kind}" for kind, count in sorted(watch.resolved.items()) if kind != "setting")
    table.add_row("groups", groups or "none yet")
    return table


def workers(watch: Watch, now: Micros) -> Table:
    """One row a worker, on any machine, whose word still holds at `now`."""
    table = Table("worker", "state", "version", "host", "pid", "url", box=None, pad_edge=False)
    for name, one in sorted(watch.workers.items()):
        if one["expires_at"] > now:
            version = "" if one["version"] is None else str(one["version"])
            says = f"{one['state']}: {one['error']}" if one["error"] else str(one["state"])
            table.add_row(name, Text(says), version, one["host"], str(one["pid"]), one["url"] or "")
    return table


def duration(seconds: float) -> str:
    """Hours, minutes, seconds."""
    minutes, left = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}"
