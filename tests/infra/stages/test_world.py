"""Exactly once through crashes, zombies, duplicates and holes, by whole histories; and that the guards do it."""

from __future__ import annotations

import random

import pytest

from millrace.infra.log.base import Place
from millrace.testing.world import Chances, World
from tests.support.counter import Clock, Counter

TOPICS = {"in": 3, "side": 1, "out": 2, "sums": 1}
ROUGH = Chances(crash=2, zombie=2, wake=2, expire=3, scale=0.5, resend=1, hole=1)


def history(seed: int, events: int, **settings: object) -> World:
    """A world after a rough history and a calm end."""
    world = World(seed, TOPICS, [Counter], chances=ROUGH, strict=True, **settings)  # type: ignore[arg-type]
    chooser = random.Random(seed)
    with world:
        for n in range(events):
            headers = {"time": str(n * chooser.choice((1, 1_000_000)))}
            world.send("in", f"k{chooser.randrange(5)}", "", b"", source=f"g{n % 2}", headers=headers)
            if n % 10 == 0:
                world.send("side", "", "", b"")
            world.chaos(4)
        world.drain()
    return world


def check(world: World, events: int) -> None:
    """Nothing lost, nothing twice: the property that the mutations must break."""
    numbers: dict[str, list[int]] = {}
    for record in world.decoded("out"):
        numbers.setdefault(record["stage"], []).append(record["slot"])
    counted = {key: found for key, found in numbers.items() if not key.startswith("extra/")}
    assert sum(len(found) for found in counted.values()) == events
    for key, found in counted.items():
        assert found == list(range(1, len(found) + 1)), key
        extras = [n for third in range(3, len(found) + 1, 3) for n in (third * 2, third * 2 + 1)]
        assert numbers.get(f"extra/{key}", []) == extras
    assert sum(world.state("counter", slot).get("side") or 0 for slot in range(3)) == 3 * -(-events // 10)


@pytest.mark.parametrize("seed", range(60))
def test_every_record_counts_once(seed: int) -> None:
    world = history(seed, 60)
    check(world, 60)
    assert world.verify() > 20


@pytest.mark.parametrize("seed", range(5))
def test_places_inside_records_are_where_the_named_records_lie(seed: int) -> None:
    world = history(seed, 60)
    sums = [s for s in world.decoded("sums") if s["kind"] == "complete"]
    assert sums
    for total in sums:
        found = world.bus.fetch([Place(**place) for place in total["trajectories"]])
        stages = [r and r.key.decode() for r in found]
        assert stages == [total["group"]] * 3


def test_a_seed_gives_one_history() -> None:
    first, again = history(7, 60), history(7, 60)
    assert first.log == again.log
    assert first.log
    assert first.records("turns.counter") == again.records("turns.counter")
    assert first.records("out") == again.records("out")


def test_time_passes_timers_in_order_and_forgets_silent_keys() -> None:
    with World(1, TOPICS, [Counter]) as world:
        for n, key in enumerate(["a", "b", "a"]):
            world.send("in", key, "", b"", headers={"time": str(n * 1_000_000)}, partition=0)
        world.send("in", "z", "", b"", headers={"time": str(60_000_000)}, partition=0)
        world.drain()
        gone = [(s["group"], s["samples"], s["time"]) for s in world.decoded("sums") if s["kind"] == "short"]
        assert gone == [("kept/b", [1], 60_000_000), ("kept/a", [1, 2], 60_000_000)]
        assert world.state("counter", 0).keys("kept/") == ["kept/z"]


@pytest.mark.parametrize("seed", range(10))
def test_a_clock_never_falls_and_ticks_once_a_second(seed: int) -> None:
    with World(seed, TOPICS, [Clock], chances=ROUGH) as world:
        for n in range(50):
            world.send("in", f"k{n % 7}", "", b"", source="g")
            world.chaos(4)
        world.drain()
        world.verify()
        for slot in range(3):
            ticks = [r["time"] // 1_000_000 for r in world.decoded("out") if (r["stage"], r["slot"]) == ("tick", slot)]
            assert ticks == sorted(set(ticks))
        times = [turn["now"] for turn in world.decoded("turns.clock") if turn["slot"] == 0]
        assert times == sorted(times)


def fails(**mutation: bool) -> int:
    """In how many of 40 histories the property fails."""
    failed = 0
    for seed in range(40):
        try:
            check(history(seed, 60, **mutation), 60)
        except AssertionError:
            failed += 1
    return failed


@pytest.mark.slow
def test_without_the_fence_records_count_twice() -> None:
    assert fails(fencing=False) > 0


@pytest.mark.slow
def test_without_the_marks_records_count_twice() -> None:
    assert fails(skip_duplicates=False) > 0
