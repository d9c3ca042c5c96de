"""A policy and its processes as they are now: followed in the topics, shown as tables, by `status` and by the demo.

Invariant: to wait is not to be wrong. A policy without version 0 is wrong only where nothing could write one."""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from rich.text import Text

from millrace.infra.log.base import Bus
from millrace.infra.log.history.follow import Follower
from millrace.infra.log.history.kinds import LEDGER, RESOLUTIONS, WEIGHTS, WORKERS
from millrace.infra.log.history.reader import History, left_out
from millrace.infra.log.history.rows import Row
from millrace.infra.machine.programs import BROKER
from millrace.infra.machine.supervisor import ProgramState
from millrace.infra.terminal import RowTable
from millrace.infra.workers import DRAIN, ENGINE, FORGOTTEN_US
from millrace.schemas.ids import Micros
from millrace.schemas.records import LedgerEntry, Resolution, WeightVersion, WorkerStatus


@dataclass
class StatusWatch:
    """`poll` reads what is new. Versions are the ledger's entries beyond version 0, in order."""

    bus: Bus
    namespace: str
    policy: str
    versions: list[LedgerEntry] = field(default_factory=list)
    resolved: Counter[str] = field(default_factory=Counter)
    last_resolution: float = 0.0
    """monotonic time at which the newest resolution was read"""
    ready: int = 0
    """one past the highest ready seq"""
    workers: dict[str, WorkerStatus] = field(default_factory=dict)
    began: bool = False
    """whether version 0 exists"""
    in_force: dict[str, Any] = field(default_factory=dict)
    """what dispatch goes by, by the name of the setting"""

    def __post_init__(self) -> None:
        history = History(self.bus, self.namespace, self.policy)
        self._follower = Follower(history, [LEDGER, RESOLUTIONS, WEIGHTS, WORKERS], left_out)

    def poll(self, timeout_s: float) -> bool:
        """Reads what came within `timeout_s`; True when there was a new version."""
        before = len(self.versions)
        self._fold(self._follower.poll(timeout_s))
        return len(self.versions) > before

    def catch_up(self) -> None:
        """Reads all that was written before this call, however fast more comes."""
        self._fold(self._follower.catch_up())

    def _fold(self, rows: Iterable[Row[Any]]) -> None:
        now = time.monotonic()
        for row in rows:
            match row.kind:
                case "ledger":
                    self.began = True
                    entry: LedgerEntry = row.record
                    if entry["version"] > 0:
                        self.versions.append(entry)
                case "resolutions":
                    resolution: Resolution = row.record
                    self.resolved[resolution["kind"]] += 1
                    self.last_resolution = now
                    if resolution["setting"] is not None:
                        with suppress(ValueError, RecursionError):  # no JSON: what was in force before is shown on
                            self.in_force[resolution["setting"]["name"]] = json.loads(resolution["setting"]["value"])
                    if resolution["seq"] is not None:
                        self.ready = max(self.ready, resolution["seq"] + 1)
                case "weights":
                    event: WeightVersion = row.record
                    if event["version"] == 0:  # a decision may have been read before it
                        self.in_force.setdefault("group_size", event["group_size"])
                case "workers":
                    status: WorkerStatus = row.record
                    if status["policy"] in (None, self.policy) and status["role"] != DRAIN:
                        self.workers[status["worker"]] = status

    @property
    def version(self) -> int:
        """The newest version, 0 before the first."""
        return self.versions[-1]["version"] if self.versions else 0

    @property
    def rewards(self) -> list[float]:
        """Mean sampled reward of each version's batch."""
        return [entry["metrics"].get("reward_mean", 0.0) for entry in self.versions]

    @property
    def lag(self) -> int:
        """Ready groups that no version has consumed."""
        return self.ready - (self.versions[-1]["seq_hi"] if self.versions else 0)

    @property
    def seconds(self) -> float:
        """From the first version's commit to the newest's."""
        return _between(self.versions)

    def rate(self, metric: str, last: int = 5) -> float:
        """Sum of a metric over the newest versions, per second of the time they took; 0 for fewer than two."""
        recent = self.versions[-last - 1 :]
        amount = sum(entry["metrics"].get(metric, 0.0) for entry in recent[1:])
        return amount / max(1e-6, _between(recent))

    def close(self) -> None:
        """Stop following."""
        self._follower.close()


def _between(versions: Sequence[LedgerEntry]) -> float:
    return (versions[-1]["time"] - versions[0]["time"]) / 1e6 if versions else 0.0


HEALTHY_STATES = ("RUNNING", "STARTING", "EXITED")
"""states of programs in which nothing is wrong"""


def steps_ahead(watch: StatusWatch | str, states: Sequence[ProgramState], now: Micros) -> list[str]:
    """What is still to come at `now` before the policy can learn, in the order in which it comes; `watch` may be why
    there is none. Empty where nothing runs here."""
    if not states:
        return []
    starting = [one.name for one in states if one.state == "STARTING" and not one.failing]
    out = [f"{', '.join(starting)} to start"] if starting else []
    if not isinstance(watch, str):
        out += [
            f"the engine at {one['url']} to load its model (it does not answer yet)"
            for one in watch.workers.values()
            if one["role"] == "engine" and one["state"] == "starting" and one["error"] and one["expires_at"] > now
        ]
    if isinstance(watch, str):
        return [*out, "the topics"] if BROKER in starting else out
    return out if watch.began else [*out, "version 0 (`millrace policy create --model DIR` writes it)"]


def wrong(watch: StatusWatch | str, states: Sequence[ProgramState], silences: Mapping[str, float]) -> bool:
    """Whether nothing runs here, a process does not run, keeps ending or is silent, or the log has no such policy
    although its broker had the time to start."""
    if not states or silences or any(one.failing or one.state not in HEALTHY_STATES for one in states):
        return True
    return isinstance(watch, str) and not any(one.name == BROKER and one.state == "STARTING" for one in states)


COLOURS = {"RUNNING": "green", "STARTING": "yellow", "BACKOFF": "red", "FATAL": "bold red", "EXITED": "dim"}
BARS = "▁▂▃▄▅▆▇█"
NO_SETTINGS: Mapping[str, Any] = MappingProxyType({})
WIDE = 60
"""newest versions in the line of rewards"""


def processes(states: Sequence[ProgramState]) -> RowTable:
    """One row a program of this machine."""
    table = RowTable("process", "state", "pid", "up", "ended", "says", box=None, pad_edge=False)
    for one in states:
        state = Text("failing", "bold red") if one.failing else Text(one.state.lower(), COLOURS.get(one.state, ""))
        up = duration(one.up_s) if one.pid else ""
        says = Text("" if one.state == "RUNNING" and not one.failing else one.said)
        table.add_row(one.name, state, str(one.pid or ""), up, f"{one.ended} times" if one.ended else "", says)
    return table


def learning(watch: StatusWatch, target: int | None = None, settings: Mapping[str, Any] = NO_SETTINGS) -> RowTable:
    """How the policy does; `target` is the version that it is to reach, if there is one; `settings` what their file
    asks for, by the name of the setting."""
    table = RowTable(box=None, show_header=False, pad_edge=False)
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
    for name, value in settings.items():
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
        if r["samples"] or (r["cell"] >= 0 and r["cell"] not in [rank["cell"] for rank in ranks[:at]])
    ]
    shares = ", ".join(f"rank {share['rank']}: {share['samples']}" for share in first)
    layout = f" as {entry['layout']}" if len(first) < len(ranks) else ""
    spares = entry["metrics"].get("spares", 0.0)
    return f"{len(ranks)}{layout} ({shares} samples)" + (f", {spares:.0f} spare" if spares else "")


def silent_workers(watch: StatusWatch, now: Micros, states: Sequence[ProgramState]) -> dict[str, float]:
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


def workers(watch: StatusWatch, now: Micros, states: Sequence[ProgramState] = ()) -> RowTable:
    """One row a worker, on any machine, whose word still holds at `now`, or whose process runs here without a word, or
    that was an engine not long ago."""
    table = RowTable("worker", "role", "state", "version", "load", "host", "pid", "url", box=None, pad_edge=False)
    silences = silent_workers(watch, now, states)
    for name, one in sorted(watch.workers.items()):
        if name in silences:
            word = Text(f"silent for {silences[name]:.0f} s: it runs, and the log has no word of it", "bold red")
            table.add_row(name, _role(one), word, "", "", one["host"], str(one["pid"]), one["url"] or "")
        elif _is_gone(one, now):
            word = Text(f"gone: no word of it for {(now - one['expires_at']) / 1e6:.0f} s", "red")
            table.add_row(name, _role(one), word, "", "", one["host"], "", one["url"] or "")
        if one["expires_at"] > now:
            version = "" if one["version"] is None else str(one["version"])
            # A drained engine says that it is stopped, so that no gateway counts on it, and in words what it is.
            words = [] if one.get("draining") and one["state"] == "stopped" else [str(one["state"])]
            says = ": ".join([*words, *([one["error"]] if one["error"] else [])])
            table.add_row(
                name, _role(one), Text(says), version, _load(one), one["host"], str(one["pid"]), one["url"] or ""
            )
    return table


def _is_gone(status: WorkerStatus, now: Micros) -> bool:
    """Whether it was an engine not long ago, and did not end well."""
    is_over = status["state"] == "stopped" and status.get("draining")
    return status["role"] == ENGINE and not is_over and now - FORGOTTEN_US < status["expires_at"] <= now


def _role(status: WorkerStatus) -> str:
    """What a worker does, and what kind of engine it is."""
    kind = status.get("kind")
    return f"{status['role']} ({kind})" if kind else status["role"]


def _load(status: WorkerStatus) -> str:
    """What an engine has to do, as far as it says."""
    parts = ["takes no new calls"] if status.get("draining") else []
    if (running := status.get("running")) is not None:
        parts.append(f"{running} running, {status.get('waiting') or 0} waiting")
    if (speed := status.get("tokens_s")) is not None:
        parts.append(f"{speed:.0f} tokens/s")
    if (share := status.get("free_cache")) is not None:
        parts.append(f"cache {share:.0%} free")
    return ", ".join(parts)


def spark(values: Sequence[float]) -> str:
    """One block character a value, 0 to 1."""
    return "".join(BARS[min(7, max(0, int(value * 8)))] for value in values)


def duration(seconds: float) -> str:
    """Hours, minutes, seconds."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
