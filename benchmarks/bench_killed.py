"""kill -9 of a learner in the demo, to the next committed version, split into its parts.

    python -m benchmarks.bench_killed [--kills 6] [--moment step|half] [--engine vllm|inprocess] [--batch 48] [--seed 0]

The whole demo runs under its supervisor: engine, gateway, stages, rollout workers and two learners. One of them is
killed, rank 0 and rank 1 in turn: once the groups of the next version are there, so that it is lost in the middle of a
step (step), or half way between two versions (half). The next kill waits until both train together again. Seconds:

    detect    the survivor's generation broke            regroup   it formed the next one, alone
    reload    it has loaded the newest version           wait      for groups that no agent had finished yet
    train     fetch, step and checkpoint                 commit    until the version was seen in the log
    next      all of it: kill -9 to the next version     own       all but the wait: what learners take to go on
    usual     between two versions, where nobody dies    back      until the successor had trained its first version

Where the groups are there, `next` is held against 3 s. Half way they are not, and that wait is not the kill's, since
experience is made while nobody trains: there it is `own`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import tomlkit

from millrace.apps.demo import run
from millrace.apps.demo.fleet import BROKER, DemoFleet
from millrace.apps.demo.plan import flags
from millrace.apps.demo.run import make_topics
from millrace.consumers.tell.status import StatusWatch
from millrace.infra.config import Settings, load
from millrace.infra.connect import connect
from millrace.infra.process.net import free_ports
from millrace.schemas.records import LedgerEntry

PARTS = ("detect", "regroup", "reload", "wait", "train", "commit")
WHOLE = ("next", "own", "usual", "back")
AIM_S = 3.0
PATIENCE_S = 600.0


class Timed(DemoFleet):
    """The demo's programs, with learners that write down where they are."""

    def __init__(self, settings: Settings, file: Path, times: Path) -> None:
        super().__init__(settings, file, {"TIMES": str(times)})
        self.times = times
        for name, program in self._programs.items():
            if name.startswith("learn-"):
                self._programs[name] = replace(program, command=[sys.executable, "-m", "benchmarks.timed_learner"])

    def passed(self, pid: int) -> list[tuple[float, str]]:
        """(wall clock, state) that a learner passed."""
        path = self.times / str(pid)
        return [(at, name) for at, name in map(json.loads, path.read_text().splitlines())] if path.exists() else []


class Runs:
    """Kills, each after the former has healed."""

    def __init__(self, fleet: Timed, watch: StatusWatch) -> None:
        self.fleet = fleet
        self.watch = watch
        self.seen: list[tuple[float, LedgerEntry]] = []
        """versions with when they were seen"""

    def until(self, reached: Callable[[], bool], what: str) -> None:
        """Watch until then."""
        deadline = time.monotonic() + PATIENCE_S
        while not reached():
            self.watch.poll(0.02)
            for entry in self.watch.versions[len(self.seen) :]:
                self.seen.append((time.time(), entry))
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not after {PATIENCE_S:.0f} s, see {self.fleet.logs}")

    def together(self) -> int:
        """The version that all learners trained, after what was seen so far."""
        since = len(self.seen)
        self.until(lambda: any(len(entry["ranks"]) > 1 for _, entry in self.seen[since:]), "both learners train")
        return self.seen[-1][1]["version"]

    def kill(self, rank: int, batch: int | None) -> Mapping[str, float]:
        """Kill -9 the learner of this rank, once so many groups are ready; None: half way to the next version."""
        self.together()
        self.together()
        usual = statistics.median(later - at for (at, _), (later, _) in pairwise(self.seen[-4:]))
        pids = [pid for name in self.fleet.names if name.startswith("learn-") and (pid := self.fleet.pid(name))]
        self.until(lambda: any(self._leads(pid) for pid in pids), "a leader")  # a group that forms anew has none yet
        leader = next(pid for pid in pids if self._leads(pid))
        victim = leader if rank == 0 else next(pid for pid in pids if pid != leader)
        survivor = next(pid for pid in pids if pid != victim)
        if batch is not None:
            self.until(lambda: self.watch.lag >= batch, "the groups of the next version")
        else:
            half = time.monotonic() + usual / 2
            self.until(lambda: time.monotonic() > half, "half of the time between two versions")
        before = len(self.seen)
        killed = time.time()
        os.kill(victim, signal.SIGKILL)
        self.until(lambda: len(self.seen) > before, "the next version")
        moment, entry = self.seen[before]
        self.until(lambda: any(len(one["ranks"]) > 1 for _, one in self.seen[before:]), "both learners again")
        back = next(at for at, one in self.seen[before:] if len(one["ranks"]) > 1)
        row = split(self.fleet.passed(survivor), entry, killed, moment)
        return {**row, "usual": usual, "back": back - killed}

    def _leads(self, pid: int) -> bool:
        return any(name == "fenced" for _, name in self._last(pid))

    def _last(self, pid: int) -> Sequence[tuple[float, str]]:
        passed = self.fleet.passed(pid)
        newest = max((number for number, (_, name) in enumerate(passed) if name == "agreed"), default=0)
        return passed[newest:]


def split(passed: Sequence[tuple[float, str]], entry: LedgerEntry, killed: float, seen: float) -> dict[str, float]:
    """Seconds of each part. `passed`: by the survivor; `entry`: of the first version after the kill."""
    after = [(at, name) for at, name in passed if at > killed]

    def last(name: str, since: float) -> float:
        return max([at for at, one in after if one == name and at <= seen], default=since)

    broke = min([at for at, name in after if name == "broke"], default=killed)
    formed = last("formed", broke)
    loaded = last("loaded", formed)
    waited = sum(entry["metrics"].get(f"timings_{name}", 0.0) for name in ("wait", "boundary"))
    done = min([at for at, name in after if name == "committed" and at >= loaded], default=seen)
    return {
        "detect": broke - killed,
        "regroup": formed - broke,
        "reload": loaded - formed,
        "wait": waited,
        "train": done - loaded - waited,
        "commit": seen - done,
        "next": seen - killed,
        "own": seen - killed - waited,
    }


def main() -> None:
    """Print a line for each kill, then medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--moment", choices=("step", "half"), default="step")
    parser.add_argument("--engine", choices=("vllm", "inprocess"), default="vllm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=48, help="groups of a version")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        values = {"engine.kind": options.engine, "policy.batch": options.batch}
        rows = measure(Path(name), options.seed, values, options.kills, options.moment)
    names = (*PARTS, *WHOLE)
    print("median  " + "  ".join(f"{name} {statistics.median(row[name] for row in rows):.2f}" for name in names))
    held = "next" if options.moment == "step" else "own"
    worst = max(row[held] for row in rows)
    print(f"{held}, of {len(rows)} kills: at most {worst:.1f} s, against {AIM_S:.0f} s")


def measure(home: Path, seed: int, values: Mapping[str, Any], kills: int, moment: str) -> list[Mapping[str, float]]:
    """One row of parts a kill. `values`: settings that differ from the demo's, by dotted name."""
    document = tomlkit.document()
    for name, value in {**flags(home, seed, free_ports(4)), **values}.items():
        section, _, key = name.rpartition(".")
        if section and section not in document:
            document[section] = tomlkit.table()
        (document[section] if section else document)[key] = value  # type: ignore[index]
    file = home / "millrace.toml"
    file.write_text(tomlkit.dumps(document))
    settings = load(file)
    times = home / "times"
    times.mkdir(exist_ok=True)
    fleet = Timed(settings, file, times)
    rows: list[Mapping[str, float]] = []
    try:
        fleet.up((BROKER,))
        make_topics(settings)
        run.warm_start(home, seed, target=0.0)
        run.create_policy(settings)
        bus = connect(settings)
        watch = StatusWatch(bus, settings.namespace, settings.policy.name)
        fleet.up()
        runs = Runs(fleet, watch)
        for number in range(kills):
            rows.append(runs.kill(number % 2, settings.policy.batch if moment == "step" else None))
            print(
                f"rank {number % 2}  " + "  ".join(f"{name} {rows[-1][name]:.2f}" for name in (*PARTS, *WHOLE)),
                flush=True,
            )
        watch.close()
        bus.close()
    finally:
        fleet.down()
    return rows


if __name__ == "__main__":
    main()
