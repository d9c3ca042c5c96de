"""The tables: how the policy does and which workers anywhere are alive, from the topics; and this machine's processes,
from the supervisor. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from infra.services.supervisor import State
from infra.view.watch import Watch
from schemas.ids import Micros
from schemas.records import LedgerEntry

COLOURS = {"RUNNING": "green", "STARTING": "yellow", "BACKOFF": "red", "FATAL": "bold red", "EXITED": "dim"}
BARS = "▁▂▃▄▅▆▇█"
WIDE = 60
"""newest versions in the line of rewards"""


def processes(states: Sequence[State]) -> Table:
    """One row a program of this machine."""
    table = Table("process", "state", "pid", "up", "says", box=None, pad_edge=False)
    for one in states:
        state = Text(one.state.lower(), COLOURS.get(one.state, ""))
        up = duration(one.up_s) if one.pid else ""
        table.add_row(one.name, state, str(one.pid or ""), up, "" if one.state == "RUNNING" else Text(one.said))
    return table


def learning(watch: Watch, target: int | None = None) -> Table:
    """How the policy does; `target` is the version that it is to reach, if there is one."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("policy", watch.policy)
    table.add_row("version", str(watch.version) if target is None else f"{watch.version} of {target}")
    if watch.versions:
        last = watch.versions[-1]
        metrics = last["metrics"]
        table.add_row("reward", f"{watch.rewards[-1]:.3f}  {spark(watch.rewards[-WIDE:])}")
        most = metrics.get("staleness_max", 0.0)
        table.add_row("staleness", f"mean {metrics.get('staleness_mean', 0.0):.2f}, max {most:.0f} versions")
        table.add_row("learners", Text(_learners(last)))
        speed = f"{watch.rate('samples'):.0f} samples/s, {watch.rate('tokens_computed'):.0f} tokens/s"
        table.add_row("speed", f"{speed} over the newest versions")
    table.add_row("waiting", f"{watch.lag} ready groups")
    groups = ", ".join(f"{count} {kind}" for kind, count in sorted(watch.resolved.items()) if kind != "setting")
    table.add_row("groups", groups or "none yet")
    return table


def _learners(entry: LedgerEntry) -> str:
    """How many trained a version, and on what: of the ranks of one cell, the first has its samples; those that serve a
    role have none."""
    ranks = entry["ranks"]
    first = [
        r
        for at, r in enumerate(ranks)
        if r["samples"] or (r["cell"] >= 0 and r["cell"] not in [other["cell"] for other in ranks[:at]])
    ]
    shares = ", ".join(f"rank {share['rank']}: {share['samples']}" for share in first)
    layout = f" as {entry['layout']}" if len(first) < len(ranks) else ""
    spares = entry["metrics"].get("spares", 0.0)
    return f"{len(ranks)}{layout} ({shares} samples)" + (f", {spares:.0f} spare" if spares else "")


def workers(watch: Watch, now: Micros) -> Table:
    """One row a worker, on any machine, whose word still holds at `now`."""
    table = Table("worker", "state", "version", "host", "pid", "url", box=None, pad_edge=False)
    for name, one in sorted(watch.workers.items()):
        if one["expires_at"] > now:
            version = "" if one["version"] is None else str(one["version"])
            says = f"{one['state']}: {one['error']}" if one["error"] else str(one["state"])
            table.add_row(name, Text(says), version, one["host"], str(one["pid"]), one["url"] or "")
    return table


def spark(values: Sequence[float]) -> str:
    """One block character a value, 0 to 1."""
    return "".join(BARS[min(7, max(0, int(value * 8)))] for value in values)


def duration(seconds: float) -> str:
    """Hours, minutes, seconds."""
    minutes, left = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}"
