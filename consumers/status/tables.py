"""The tables: how the policy does and which workers anywhere are alive, from the topics; and this machine's processes,
from the supervisor. Pure."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rich.table import Table
from rich.text import Text

from millrace.consumers.status.watch import StatusWatch
from millrace.infra.machine.supervisor import ProgramState
from millrace.schemas.ids import Micros
from millrace.schemas.records import LedgerEntry

COLOURS = {"RUNNING": "green", "STARTING": "yellow", "BACKOFF": "red", "FATAL": "bold red", "EXITED": "dim"}
BARS = "▁▂▃▄▅▆▇█"
NOTHING: Mapping[str, Any] = MappingProxyType({})
WIDE = 60
"""newest versions in the line of rewards"""


def processes(states: Sequence[ProgramState]) -> Table:
    """One row a program of this machine."""
    table = Table("process", "state", "pid", "up", "ended", "says", box=None, pad_edge=False)
    for one in states:
        state = Text("failing", "bold red") if one.failing else Text(one.state.lower(), COLOURS.get(one.state, ""))
        up = duration(one.up_s) if one.pid else ""
        says = Text("" if one.state == "RUNNING" and not one.failing else one.said)
        table.add_row(one.name, state, str(one.pid or ""), up, f"{one.ended} times" if one.ended else "", says)
    return table


def learning(watch: StatusWatch, target: int | None = None, asked: Mapping[str, Any] = NOTHING) -> Table:
    """How the policy does; `target` is the version that it is to reach, if there is one; `asked` what the settings file
    asks for, by the name of the setting."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("policy", watch.policy)
    table.add_row("version", _version(watch, target))
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
    for name, value in asked.items():
        if name in watch.in_force and watch.in_force[name] != value:
            table.add_row(name, f"asked {value}, in force {watch.in_force[name]}: `millrace up` asks for it")
    return table


def _version(watch: StatusWatch, target: int | None) -> str:
    if not watch.began:
        return "none yet: `millrace policy create --model DIR` writes version 0"
    return str(watch.version) if target is None else f"{watch.version} of {target}"


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


def silent(watch: StatusWatch, now: Micros, states: Sequence[ProgramState]) -> dict[str, float]:
    """Workers whose word has lapsed although their process runs on this machine, and for how many seconds: their
    client of the log hears nothing, or they are frozen."""
    running = {one.pid: one.up_s for one in states if one.pid and one.state == "RUNNING"}
    return {
        name: (now - one["expires_at"]) / 1e6
        for name, one in watch.workers.items()
        if one["host"] == socket.gethostname()
        and one["expires_at"] <= now
        and one["state"] != "stopped"
        and running.get(one["pid"], 0.0) > (now - one["expires_at"]) / 1e6  # else the number is another program's
    }


def workers(watch: StatusWatch, now: Micros, states: Sequence[ProgramState] = ()) -> Table:
    """One row a worker, on any machine, whose word still holds at `now`, or whose process runs here without a word."""
    table = Table("worker", "state", "version", "host", "pid", "url", box=None, pad_edge=False)
    lapsed = silent(watch, now, states)
    for name, one in sorted(watch.workers.items()):
        if name in lapsed:
            word = Text(f"silent for {lapsed[name]:.0f} s: it runs, and the log has no word of it", "bold red")
            table.add_row(name, word, "", one["host"], str(one["pid"]), one["url"] or "")
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
