"""`make chaos`: every kill point three times, random kills, zombies, joins and leaves on a real deployment; then audit.
After it the kill points of each other way of weights to engines, on a deployment and with an audit of its own.

    python -m tests.chaos [--home DIR] [--seed N] [--engine vllm|inprocess] [--times 3] [--kills 50] ...

Prints a table of faults with how often each was survived and the longest wait for the next version, then the audit.
Exits 0 only when every fault was survived, every point was reached and every audit (checkpoint files included) is
clean.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from millrace.apps.demo.fleet import BROKER, ENGINE
from millrace.infra.connect import connect
from tests.chaos.arena import START_S, Arena
from tests.chaos.deploy import deploy
from tests.chaos.ways import WAYS, every_point, points_of

LEAST = {ENGINE: 5, BROKER: 10}
"""Fewest random kills of these programs."""

ELSEWHERE = ("claims.", "capture.rolled", "capture.synced", "warehouse.", "relay.", "drain.")
"""Points that this traffic never passes (no record is too large, no log file fills up, there is one engine): their own
tests kill there."""


def main() -> int:
    """Parses the flags and runs every phase."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--home", type=Path, default=Path(".millrace/chaos"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=("vllm", "inprocess"), default="vllm")
    parser.add_argument("--times", type=int, default=3, help="how often each kill point is hit")
    parser.add_argument("--points", default="", help="only points that begin like this")
    parser.add_argument("--kills", type=int, default=50, help="random kills over all kinds of processes")
    parser.add_argument("--zombies", type=int, default=20, help="SIGSTOPs of the learner's leader and of dispatch")
    parser.add_argument("--moves", type=int, default=30, help="joins and leaves")
    parser.add_argument("--ways", nargs="*", choices=[*WAYS], default=[*WAYS], help="other ways of weights to engines")
    options = parser.parse_args()
    home = options.home.absolute()
    shutil.rmtree(home, ignore_errors=True)

    def everything(arena: Arena) -> list[str]:
        missed = kill_points(arena, points(options.points), options.times)
        random_kills(arena, options.kills)
        zombies(arena, options.zombies)
        moves(arena, options.moves)
        return missed

    good = [suffer(deploy(home / "main", options.seed, options.engine), everything, "chaos")]
    for way in options.ways:
        names = [name for name in points_of(way) if name.startswith(options.points)]
        arena = deploy(home / way, options.seed, options.engine, way)
        good.append(suffer(arena, partial(kill_points, names=names, times=options.times), f"chaos: {way}"))
    return 0 if all(good) else 1


def suffer(arena: Arena, faults_of: Callable[[Arena], list[str]], title: str) -> bool:
    """Let a deployment suffer what `faults_of` does to it (gives the points that were not reached), end it, and say how
    it went. True when every point was reached and the audit is clean."""
    console, started = Console(), time.monotonic()
    try:
        arena.settle(timeout_s=START_S)
        missed = faults_of(arena)
        arena.settle(2)
        arena.fleet.up((BROKER,))
        clean = audit(arena)
    finally:
        arena.close()
        arena.fleet.down()
    table = Table("fault", "survived", "longest wait for the next version, s", title=title)
    for fault, count in sorted(arena.faults.items()):
        table.add_row(fault, str(count), f"{arena.slowest[fault]:.1f}")
    console.print(table)
    console.print(
        f"{sum(arena.faults.values())} faults, version {arena.watch.version}, {time.monotonic() - started:.0f} s"
    )
    if missed:
        console.print(f"[red]points that no process passed: {', '.join(missed)}[/red]")
    return clean and not missed


def points(*prefixes: str) -> list[str]:
    """Every kill point of the code that begins so, less those that this traffic never passes: some lie where only other
    traffic comes, some on other ways of weights to engines."""
    elsewhere = {*points_of(*WAYS), *(name for name in every_point() if name.startswith(ELSEWHERE))}
    return [name for name in every_point() if name.startswith(prefixes) and name not in elsewhere]


def kill_points(arena: Arena, names: list[str], times: int, timeout_s: float = 300) -> list[str]:
    """Each named point `times` times, a version between any two; gives those that were not reached."""
    return [missed for name in names for _ in range(times) for missed in arena.kill_points([name], timeout_s)]


def random_kills(arena: Arena, count: int) -> None:
    """`count` kills, the engine, the broker and the supervisor among them as often as is asked for."""
    if count <= 0:
        return
    must = [name for name, least in LEAST.items() for _ in range(min(least, count))]
    others = [name for name in arena.fleet.names if name not in LEAST]
    chosen = must + [arena.random.choice(others) for _ in range(max(0, count - 1 - len(must)))]
    arena.random.shuffle(chosen)
    for name in chosen:
        arena.kill(name)
    arena.kill_supervisor()


def zombies(arena: Arena, count: int) -> None:
    """Freeze whoever leads: the learner's rank 0 and the owner of dispatch, in turn."""
    if count <= 0:
        return
    for name, like in (("dispatch-b", "dispatch"), ("learn-b", "learn-0")):
        arena.join(name, like)
    for number in range(count):
        if number % 2:
            arena.wait(lambda: arena.owner("dispatch") is not None, "an owner of dispatch")
            arena.freeze(str(arena.owner("dispatch")), "dispatch")
        else:
            arena.wait(lambda: arena.leader() is not None, "a leader of the learners")
            arena.freeze(str(arena.leader()), "learner")
    for name in ("dispatch-b", "learn-b"):
        arena.leave(name)


def moves(arena: Arena, count: int) -> None:
    """Joins and leaves of learners, stages and rollout workers."""
    guests: list[str] = []
    for number in range(count):
        if guests and (len(guests) == 3 or arena.random.random() < 0.5):
            arena.leave(guests.pop(arena.random.randrange(len(guests))))
        else:
            like = arena.random.choice(("learn-0", "rollout-0", "seal", "refine", "dispatch"))
            guests.append(f"{like.split('-')[0]}-guest{number}")
            arena.join(guests[-1], like)
    for guest in guests:
        arena.leave(guest)


def audit(arena: Arena) -> bool:
    """The topics and the checkpoint files, by the product's own command."""
    from millrace.consumers import audit as auditor

    with connect(arena.settings):
        return auditor.run(arena.settings, files=True, as_json=False) == 0


if __name__ == "__main__":
    sys.exit(main())
