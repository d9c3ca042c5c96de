"""The check of stages passes those that keep the contract, and finds each way of breaking it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest

import millrace.testing
from millrace.infra.errors import ReplayError, StageError
from millrace.infra.log.base import Record
from millrace.infra.stages.base import Emit, Op, Put, Stage, Table, View
from millrace.testing import Sent, World, check_stage
from tests.support.counter import Clock, Counter

TOPICS = {"in": 2, "side": 1, "out": 2, "sums": 1}
RECORDS = [Sent("in", f"k{n % 3}", "", b"", {"time": str(n * 1_000_000)}) for n in range(30)]
SEEDS = range(6)


class Broken(Stage):
    """Says how many records it has folded; what is wrong with it is in its children."""

    name, primary = "broken", "in"
    count = Table[list[int]]("count")

    def number(self, view: View) -> list[int]:
        return [*(view.get(self.count.key()) or []), 1]

    def on_record(self, view: View, record: Record, now: int) -> Iterable[Op]:
        kept = self.number(view)
        yield Put(self.count.key(), kept)
        yield Emit("out", "k", "Progress", {"stage": "s", "slot": len(kept), "time": now})


class Remembers(Broken):
    """Keeps a field of its own, which dies with the process."""

    def __init__(self) -> None:
        self.kept: list[int] = []

    def number(self, view: View) -> list[int]:
        self.kept = [*self.kept, 1]
        return self.kept


class Draws(Broken):
    """Says what no other process would."""

    drawn = itertools.count()

    def number(self, view: View) -> list[int]:
        return [1] * (next(self.drawn) % 1_000)


class Mutates(Broken):
    """Changes what it read, where a `Put` belongs."""

    def on_record(self, view: View, record: Record, now: int) -> Iterable[Op]:
        kept = view.get(self.count.key())
        if kept is None:
            yield Put(self.count.key(), [1])
        else:
            kept.append(1)


class Raises(Broken):
    """Gives up at a record."""

    def number(self, view: View) -> list[int]:
        raise KeyError("k")


def test_the_public_names() -> None:
    builders = {"Attempt", "Episode", "Sent", "model_call", "reward_body"}
    checks = {"check_detector", "check_stage", "check_verifier", "judge"}
    assert set(millrace.testing.__all__) == builders | checks | {"CALM", "Chances", "World"}


def test_a_stage_that_keeps_the_contract_passes_and_the_law_sees_every_history() -> None:
    seen: list[int] = []

    def law(world: World) -> None:
        seen.append(len([one for one in world.decoded("out") if not one["stage"].startswith("extra/")]))

    check_stage(Counter, TOPICS, [*RECORDS, Sent("side", "", "", b"")], seeds=SEEDS, law=law)
    assert seen == [30] * 7


def test_a_clock_stage_passes() -> None:
    check_stage(Clock, TOPICS, RECORDS, seeds=SEEDS)


@pytest.mark.parametrize(
    ("stage", "error"), [(Remembers, ReplayError), (Draws, ReplayError), (Mutates, StageError), (Raises, KeyError)]
)
def test_each_breach_is_found(stage: type[Stage], error: type[Exception]) -> None:
    check_stage(Broken, TOPICS, RECORDS, seeds=SEEDS)
    with pytest.raises(error):
        check_stage(stage, TOPICS, RECORDS, seeds=SEEDS)


def test_a_law_that_does_not_hold_is_raised() -> None:
    def law(world: World) -> None:
        assert not world.decoded("out")

    with pytest.raises(AssertionError):
        check_stage(Counter, TOPICS, RECORDS, seeds=SEEDS, law=law)
