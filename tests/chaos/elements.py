"""What no process does to another: frozen machines, power cuts, full and read-only disks, storms. Each ends in three
more versions.

    python -m tests.chaos.elements [--home DIR] [--times 3] [--only freeze power powers full read-only learner ...]

Prints a table: of each strike the seconds from the end of the disturbance to the next version and to the third one,
the audit (files hashed, of the running deployment), and the records lost and doubled by a checker that shares no code
with Millrace (`count`); in the last line the same once all that runs is the broker. Exits 0 only when all came back,
every audit is clean and nothing is missing or there twice.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from millrace.apps.demo.fleet import BROKER
from millrace.consumers.audit.command import render, report_of
from millrace.infra.connect import connect
from millrace.infra.local_keys import kafka_options
from millrace.infra.machine import leftovers
from millrace.infra.machine.broker import answers
from millrace.infra.process.net import wait_until
from tests.chaos.arena import START_S, Arena, Stuck
from tests.chaos.count import count
from tests.chaos.deploy import deploy
from tests.chaos.disk import Disk

FROZEN_S = 10.0
STORM_S, STRIKE_S = 10.0, 2.0
FULL_S = 30.0
"""how long the disk takes nothing: everything that writes has found it so, and been started again"""
DEATHS, LIFE_S = 6, 12.0
"""kills of the broker in a row, and how long it lives between two at most: a start takes less on a quiet machine"""
CUTS, EARLY_S = 4, 30.0
STORMS = {"learner": "learn-0", "gateway": "gateway", "rollout": "rollout-0"}
"""element -> the program that is killed again and again"""
ELEMENTS = ("freeze", "power", "powers", "full", "read-only", "brokers", *STORMS)
MORE = 3
PATIENCE_S = 400.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one strike ended in. `next_s`, `more_s`: from the end of the disturbance to the first version that was
    committed after it and to the `MORE`th, seconds; None where none came. `audit`: "clean" or the broken laws."""

    element: str
    run: int | None
    next_s: float | None
    more_s: float | None
    audit: str
    lost: int | None
    doubled: int | None

    @property
    def good(self) -> bool:
        """Whether it came back, and the log is whole."""
        return self.audit == CLEAN and self.lost == self.doubled == 0


CLEAN = "clean"


class Elements:
    """A deployment on a disk of its own."""

    def __init__(
        self,
        home: Path,
        seed: int,
        size_mb: int = 4000,
        full_s: float = FULL_S,
        deaths: int = DEATHS,
        **settings: object,
    ) -> None:
        shutil.rmtree(home, ignore_errors=True)
        self._disk = Disk(home / "disk", size_mb)
        self._place = home / "disk" / "home"
        self._kept = home / "logs"
        self._seed = seed
        self._full_s, self._deaths = full_s, deaths
        self._random = random.Random(seed)
        self._ended = 0.0
        """when the newest disturbance was over, seconds since the epoch"""
        self.arena = deploy(self._place, seed, "inprocess", **settings)
        self.arena.settle(timeout_s=START_S)
        print(f"version {self.arena.watch.version} is there", flush=True)

    def close(self) -> None:
        """Everything ends."""
        self.arena.close()
        self.arena.fleet.down()
        self._disk.close()

    def over(self) -> None:
        """The disturbance has ended: from here on it counts how long it takes."""
        self._ended = time.time()

    def after(self, what: str) -> tuple[float, float]:
        """Seconds from the end of the disturbance to the next version that is committed, and to the `MORE`th. Raises
        Stuck."""
        ended, watch = self._ended, self.arena.watch

        def came(wanted: int) -> bool:
            """Of versions since the disturbance ended: what was written while it went on may be read only now."""
            return sum(entry["time"] > ended * 1e6 for entry in watch.versions) >= wanted

        took = []
        for wanted in (1, MORE):
            self.arena.wait(partial(came, wanted), f"{wanted} more after {what}", PATIENCE_S)
            took.append(time.time() - ended)
        load = f"load {os.getloadavg()[0]:.0f}"
        print(f"{what}: the next version {took[0]:.0f} s later, version {watch.version}, {load}", flush=True)
        return took[0], took[1]

    # ---- the elements

    def strike(self, element: str) -> tuple[float, float]:
        """One of `ELEMENTS`; gives the seconds to the next version and to the `MORE`th. Raises Stuck."""
        ways: dict[str, Callable[[], tuple[float, float]]] = {
            "freeze": self.freeze,
            "power": self.power,
            "powers": self.powers,
            "full": self.full,
            "read-only": self.read_only,
            "brokers": self.brokers,
            **{name: partial(self.storm, program) for name, program in STORMS.items()},
        }
        return ways[element]()

    def freeze(self) -> tuple[float, float]:
        """Every process stands still for a while and goes on in another order."""
        frozen = self._stop_all()
        time.sleep(FROZEN_S)
        self._random.shuffle(frozen)
        for process in frozen:
            with suppress(psutil.NoSuchProcess):
                process.resume()
        self.over()
        return self.after("freeze")

    def power(self) -> tuple[float, float]:
        """What was not synced is gone, and so is every process."""
        self._cut()
        self._look_again()
        return self.after("power")

    def powers(self) -> tuple[float, float]:
        """The power fails again and again while everything starts."""
        self._cut()
        for _ in range(CUTS):
            time.sleep(self._random.uniform(0, EARLY_S))
            self._cut()
        self._look_again()
        return self.after("powers")

    def _cut(self) -> None:
        """Cut the power, and bring everything up."""
        frozen = self._stop_all()
        left = self._disk.snapshot()
        for process in frozen:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(frozen, 30)
        self.arena.close()
        self._disk.restore(left)
        self.over()
        self.arena.fleet.up()

    def _look_again(self) -> None:
        settings = self.arena.settings
        reached = partial(answers, settings.kafka.bootstrap, options=kafka_options(settings))
        wait_until(reached, "the broker after the power cut", PATIENCE_S)
        self.arena = Arena(self._place, self._seed)
        self.arena.watch.catch_up()

    def full(self) -> tuple[float, float]:
        """The disk takes nothing for a while."""
        self._disk.fill()
        time.sleep(self._full_s)
        self._disk.free()
        self.over()
        return self.after("full")

    def read_only(self) -> tuple[float, float]:
        """The file system finds an error and takes nothing more. Whoever runs it stops all, mends and mounts it, and
        brings all up again: a file system in error can be mended in no other way."""
        self._disk.fail()
        time.sleep(self._full_s)
        self.arena.close()
        self.arena.fleet.down()
        self._disk.mend()
        self.over()
        self.arena.fleet.up()
        self._look_again()
        return self.after("read-only")

    def brokers(self) -> tuple[float, float]:
        """kill -9 of the broker again and again, at random moments: while it serves, starts and recovers."""
        for _ in range(self._deaths):
            time.sleep(self._random.uniform(0, LIFE_S))
            self._kill(BROKER)
            self.over()
        return self.after("brokers")

    def storm(self, program: str) -> tuple[float, float]:
        """kill -9 of one program again and again."""
        until = time.monotonic() + STORM_S
        while time.monotonic() < until:
            self._kill(program)
            self.over()
            time.sleep(STRIKE_S)
        return self.after(f"storm of {program}")

    def _kill(self, program: str) -> None:
        """kill -9, where it runs."""
        if pid := self.arena.fleet.pid(program):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _stop_all(self) -> list[psutil.Process]:
        return freeze(lambda: leftovers.find(self.arena.fleet.deployment))

    def judge(
        self, element: str, run: int | None = None, took: tuple[float | None, float | None] = (None, None)
    ) -> Outcome:
        """The audit, and the count, of what is in the log now."""
        s = self.arena.settings
        with connect(s):
            report = report_of(s, files=True)
        if not report.clean:  # the disk goes, and with it what the broker did
            shutil.copytree(self._place / "logs", self._kept, dirs_exist_ok=True)
            Console().print(render(report), f"what the processes wrote is in {self._kept}")
        broken = ", ".join(finding.law for finding in report.findings if not finding.holds)
        counted = count(s.kafka.bootstrap, s.namespace, s.policy.name, kafka_options(s))
        return Outcome(element, run, *took, CLEAN if report.clean else broken, counted["lost"], counted["doubled"])

    def judge_all(self) -> Outcome:
        """The same of the whole log, once all that runs is the broker."""
        self.arena.settle(2)
        self.arena.fleet.up((BROKER,))
        return self.judge("all")


def freeze(find: Callable[[], Iterable[psutil.Process]]) -> list[psutil.Process]:
    """Stop every process that `find` finds, those too that they start meanwhile."""
    frozen: set[psutil.Process] = set()
    while found := [process for process in find() if process not in frozen]:
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        frozen.update(found)
    return list(frozen)


def suffer(home: Path, seed: int, times: int, only: list[str]) -> bool:
    """Every chosen element `times` times, each with its judgement, then that of all. Prints the table, also where one
    does not come back: nothing is struck after it."""
    outcomes: list[Outcome] = []
    elements = Elements(home, seed)
    try:
        for name in only or ELEMENTS:
            for run in range(1, times + 1):
                try:
                    outcomes.append(elements.judge(name, run, elements.strike(name)))
                except Stuck as stuck:
                    print(stuck, flush=True)
                    outcomes.append(Outcome(name, run, None, None, "not come back", None, None))
                    return False
        outcomes.append(elements.judge_all())
    finally:
        Console().print(table(outcomes))
        elements.close()
    return all(outcome.good for outcome in outcomes)


def table(outcomes: Iterable[Outcome]) -> Table:
    """One row a strike."""
    columns = ("element", "run", "next version, s", f"{MORE} versions, s", "audit", "lost", "doubled")
    drawn = Table(*columns, title="elements")
    for o in outcomes:
        seconds = ("" if took is None else f"{took:.1f}" for took in (o.next_s, o.more_s))
        others = ("" if number is None else str(number) for number in (o.lost, o.doubled))
        drawn.add_row(o.element, "" if o.run is None else str(o.run), *seconds, o.audit, *others)
    return drawn


def main() -> int:
    """Parses the flags."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.elements", description=__doc__)
    parser.add_argument("--home", type=Path, default=Path(".millrace/elements"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=ELEMENTS, default=[])
    options = parser.parse_args()
    if not Disk.possible():
        print("these runs need root and a loop device", file=sys.stderr)
        return 1
    return 0 if suffer(options.home.absolute(), options.seed, options.times, options.only) else 1


if __name__ == "__main__":
    sys.exit(main())
