"""What no process does to another: frozen machines, power cuts, full disks, storms. Each ends in three more versions.

    python -m tests.chaos.elements [--home DIR] [--times 3] [--only freeze power powers full learner ...]

Prints the seconds to three further versions after each, then the audit and a count of what was lost or doubled by a
checker that shares no code with Millrace. Exits 0 only when all came back, the audit is clean and nothing is missing.
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
from functools import partial
from pathlib import Path

import psutil

from millrace.apps.demo.fleet import BROKER
from millrace.infra.local_keys import kafka_options
from millrace.infra.machine import leftovers
from millrace.infra.machine.broker import answers
from millrace.infra.process.net import wait_until
from tests.chaos.__main__ import audit
from tests.chaos.arena import START_S, Arena
from tests.chaos.count import count
from tests.chaos.deploy import deploy
from tests.chaos.disk import Disk

FROZEN_S = 10.0
STORM_S, STRIKE_S = 10.0, 2.0
FULL_S = 30.0
"""long enough that everything that writes has found it full, and been started again"""
DEATHS, LIFE_S = 6, 12.0
"""kills of the broker in a row, and how long it lives between two at most: a start takes less on a quiet machine"""
CUTS, EARLY_S = 4, 30.0
STORMS = {"learner": "learn-0", "gateway": "gateway", "rollout": "rollout-0"}
"""element -> the program that is killed again and again"""
ELEMENTS = ("freeze", "power", "powers", "full", "brokers", *STORMS)
MORE = 3
PATIENCE_S = 400.0


class Elements:
    """A deployment on a disk of its own."""

    def __init__(
        self, home: Path, seed: int, size_mb: int = 4000, full_s: float = FULL_S, deaths: int = DEATHS
    ) -> None:
        shutil.rmtree(home, ignore_errors=True)
        self._disk = Disk(home / "disk", size_mb)
        self._place = home / "disk" / "home"
        self._kept = home / "logs"
        self._seed = seed
        self._full_s, self._deaths = full_s, deaths
        self._random = random.Random(seed)
        self.arena = deploy(self._place, seed, "inprocess")
        self.arena.settle(timeout_s=START_S)
        print(f"version {self.arena.watch.version} is there", flush=True)

    def close(self) -> None:
        """Everything ends."""
        self.arena.close()
        self.arena.fleet.down()
        self._disk.close()

    def after(self, what: str) -> float:
        """Seconds to three more versions."""
        began = time.monotonic()
        self.arena.settle(MORE, PATIENCE_S)
        took = time.monotonic() - began
        load = f"load {os.getloadavg()[0]:.0f}"
        print(
            f"{what}: {MORE} versions more after {took:.0f} s, version {self.arena.watch.version}, {load}", flush=True
        )
        return took

    # ---- the elements

    def strike(self, element: str) -> float:
        """One of `ELEMENTS`; gives the seconds to three more versions."""
        ways: dict[str, Callable[[], float]] = {
            "freeze": self.freeze,
            "power": self.power,
            "powers": self.powers,
            "full": self.full,
            "brokers": self.brokers,
            **{name: partial(self.storm, program) for name, program in STORMS.items()},
        }
        return ways[element]()

    def freeze(self) -> float:
        """Every process stands still for a while and goes on in another order."""
        frozen = self._stop_all()
        time.sleep(FROZEN_S)
        self._random.shuffle(frozen)
        for process in frozen:
            with suppress(psutil.NoSuchProcess):
                process.resume()
        return self.after("freeze")

    def power(self) -> float:
        """What was not synced is gone, and so is every process."""
        self._cut()
        self._look_again()
        return self.after("power")

    def powers(self) -> float:
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
        self.arena.fleet.up()

    def _look_again(self) -> None:
        settings = self.arena.settings
        reached = partial(answers, settings.kafka.bootstrap, options=kafka_options(settings))
        wait_until(reached, "the broker after the power cut", PATIENCE_S)
        self.arena = Arena(self._place, self._seed)
        self.arena.watch.catch_up()

    def full(self) -> float:
        """The disk takes nothing for a while."""
        self._disk.fill()
        time.sleep(self._full_s)
        self._disk.free()
        return self.after("full")

    def brokers(self) -> float:
        """kill -9 of the broker again and again, at random moments: while it serves, starts and recovers."""
        for _ in range(self._deaths):
            time.sleep(self._random.uniform(0, LIFE_S))
            self._kill(BROKER)
        return self.after("brokers")

    def storm(self, program: str) -> float:
        """kill -9 of one program again and again."""
        until = time.monotonic() + STORM_S
        while time.monotonic() < until:
            self._kill(program)
            time.sleep(STRIKE_S)
        return self.after(f"storm of {program}")

    def _kill(self, program: str) -> None:
        """kill -9, where it runs."""
        if pid := self.arena.fleet.pid(program):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _stop_all(self) -> list[psutil.Process]:
        return freeze(lambda: leftovers.find(self.arena.fleet.deployment))

    def judge(self) -> bool:
        """The audit, and the count."""
        self.arena.settle(2)
        self.arena.fleet.up((BROKER,))
        clean = audit(self.arena)
        s = self.arena.settings
        if not clean:  # the disk goes, and with it what the broker did
            shutil.copytree(self._place / "logs", self._kept, dirs_exist_ok=True)
            print(f"what the processes wrote is in {self._kept}", flush=True)
        counted = count(s.kafka.bootstrap, s.namespace, s.policy.name, kafka_options(s))
        print(f"audit {'clean' if clean else 'NOT CLEAN'}; counted {counted}", flush=True)
        return clean and counted["lost"] == counted["doubled"] == 0


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
    """Every chosen element `times` times, then the judgement."""
    elements = Elements(home, seed)
    try:
        for name in only or ELEMENTS:
            for _ in range(times):
                elements.strike(name)
        return elements.judge()
    finally:
        elements.close()


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
