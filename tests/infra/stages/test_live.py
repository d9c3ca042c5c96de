"""The live loop: what it does when the log refuses, is away, or has lost what was not read yet."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest

from millrace.infra.errors import RefusedError, StorageError, TopicError, UnreachableError
from millrace.infra.log.base import MemberToken, Outgoing, Tail, Transactor
from millrace.infra.log.memory.bus import MemoryBus
from millrace.infra.stages.live import StageRunner, run_stage
from millrace.infra.stages.slot import RunnerSettings
from millrace.infra.stages.telemetry import TurnReport
from millrace.schemas import codec
from tests.support.counter import Counter

TOPICS = {"n.in": 2, "n.side": 1, "n.out": 1, "n.sums": 1, "n.changelog.counter": 2, "n.turns.counter": 2}


class Listener:
    """Notes what the runner tells."""

    def __init__(self) -> None:
        self.turns: list[TurnReport] = []
        self.openings: list[tuple[int, int]] = []
        self.drops: list[Exception] = []
        self.lags: list[tuple[int, int]] = []

    def turn(self, report: TurnReport) -> None:
        self.turns.append(report)

    def on_open(self, stage: str, slot: int, seconds: float, record_count: int) -> None:
        self.openings.append((slot, record_count))

    def on_drop(self, stage: str, slot: int, reason: Exception) -> None:
        self.drops.append(reason)

    def lag(self, stage: str, slot: int, offsets: int) -> None:
        self.lags.append((slot, offsets))


def put(bus: MemoryBus, count: int, topic: str = "n.in") -> None:
    with bus.publisher() as publisher:
        for n in range(count):
            publisher.publish(Outgoing(topic, b"k", b"", partition=n % bus.partitions(topic))).result()


def count(bus: MemoryBus) -> int:
    return len([r for r in bus.read("n.out", 0) if b"extra" not in (r.value or b"")])


def test_slots_open_fold_and_tell() -> None:
    bus, told = MemoryBus(TOPICS), Listener()
    put(bus, 8)
    put(bus, 2, "n.side")
    runner = StageRunner(bus, Counter(), RunnerSettings("n", telemetry=told))
    assert [runner.step(0), runner.step(0), runner.step(0)] == [0, 12, 0]
    assert told.openings == [(0, 0), (1, 0)]
    assert [(t.slot, t.number, len(t.records), t.duplicates, t.emitted["out"]) for t in told.turns] == [
        (0, 0, 6, 0, 6),
        (1, 0, 6, 0, 6),
    ]
    assert told.lags[-2:] == [(0, 0), (1, 0)] or len(told.lags) == 2
    runner.close()
    runner.close()
    assert bus.group("n.counter").members == ()


def test_what_the_sides_held_at_opening_comes_before_the_primary() -> None:
    class Slow(MemoryBus):
        """Nothing arrives at those who follow."""

        def tail(self, positions: Mapping[tuple[str, int], int]) -> Tail:
            tail = super().tail(positions)
            tail.poll = lambda *_: []  # type: ignore[method-assign]
            return tail

    bus, told = Slow(TOPICS), Listener()
    put(bus, 8)
    put(bus, 2, "n.side")
    runner = StageRunner(bus, Counter(), RunnerSettings("n", telemetry=told))
    assert [runner.step(0), runner.step(0)] == [0, 12]
    assert [[record.topic for record in turn.records][:3] for turn in told.turns] == [["n.side", "n.side", "n.in"]] * 2
    runner.close()
    again = StageRunner(bus, Counter(), RunnerSettings("n", telemetry=told))
    put(bus, 1, "n.side")
    assert [again.step(0), again.step(0)] == [0, 2]
    again.close()


def test_large_batches_are_cut() -> None:
    bus, told = MemoryBus(TOPICS), Listener()
    with bus.publisher() as publisher:
        for _ in range(10):
            publisher.publish(Outgoing("n.in", b"k", b"x" * 100, partition=0)).result()
    runner = StageRunner(bus, Counter(), RunnerSettings("n", telemetry=told, turn_bytes=250))
    runner.step(0)
    assert runner.step(0) == 10
    assert [len(turn.records) for turn in told.turns] == [2] * 5


class Failing(MemoryBus):
    """Fails the next operations with what is in `errors`."""

    def __init__(self) -> None:
        super().__init__(TOPICS)
        self.errors: list[tuple[str, Exception]] = []

    def fail(self, where: str) -> None:
        if self.errors and self.errors[0][0] == where:
            raise self.errors.pop(0)[1]

    def transactor(self, transactional_id: str) -> Transactor:
        self.fail("fence")
        found: Any = super().transactor(transactional_id)
        commit = found.commit

        def failing(offsets: Mapping[tuple[str, int], int], member: MemberToken | None) -> None:
            self.fail("before")
            commit(offsets, member)
            self.fail("after")

        found.commit = failing
        return found


@pytest.mark.parametrize("where", ["fence", "before", "after"])
@pytest.mark.parametrize("error", [UnreachableError("away"), RefusedError("moved on")])
def test_a_slot_that_lost_its_turn_is_restored_and_nothing_counts_twice(where: str, error: Exception) -> None:
    bus, told = Failing(), Listener()
    put(bus, 8)
    bus.errors = [(where, error), (where, error)]
    runner = StageRunner(bus, Counter(), RunnerSettings("n", telemetry=told), backoff_s=0)
    for _ in range(12):
        runner.step(0)
    assert told.drops == [error, error]
    assert count(bus) == 8


def test_what_was_polled_without_membership_is_polled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    bus, told = MemoryBus(TOPICS), Listener()
    put(bus, 4)
    runner = StageRunner(bus, Counter(), RunnerSettings("n", telemetry=told), backoff_s=0)
    runner.step(0)

    def expelled() -> MemberToken:
        raise RefusedError("not a member")

    with monkeypatch.context() as patch:
        patch.setattr(runner._member, "token", expelled)
        assert runner.step(0) == 0
    assert len(told.drops) == 2
    for _ in range(3):
        runner.step(0)
    assert count(bus) == 4


def test_a_failed_slot_waits_before_it_tries_again() -> None:
    bus, told = Failing(), Listener()
    bus.errors = [("fence", UnreachableError("away"))] * 50
    runner = StageRunner(bus, Counter(), RunnerSettings("n", telemetry=told), backoff_s=60)
    for _ in range(10):
        runner.step(0)
    assert len(told.drops) == 2  # once for each slot


def test_records_deleted_unread_are_an_error_not_a_jump() -> None:
    bus = MemoryBus(TOPICS)
    put(bus, 20)
    runner = StageRunner(bus, Counter(), RunnerSettings("n", turn_records=4))
    runner.step(0)
    runner.step(0)
    runner.close()
    bus.delete_before("n.in", 0, 9)
    runner = StageRunner(bus, Counter(), RunnerSettings("n"))
    with pytest.raises(TopicError, match="deleted unread"):
        runner.step(0)


class Broken(Counter):
    """Cannot tell the time of any record."""

    error: type[Exception] = ZeroDivisionError

    def time_of(self, view: object, record: object) -> int:
        raise self.error


def test_bugs_are_not_retried() -> None:
    bus = MemoryBus(TOPICS)
    put(bus, 2)
    runner = StageRunner(bus, Broken(), RunnerSettings("n", isolate=False))
    runner.step(0)
    with pytest.raises(ZeroDivisionError):
        runner.step(0)


def test_what_cannot_be_folded_is_a_dead_letter_and_the_log_of_the_process_says_where(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bus = MemoryBus({**TOPICS, "n.dead-letters": 2})
    put(bus, 2)
    runner = StageRunner(bus, Broken(), RunnerSettings("n"))
    assert [runner.step(0), runner.step(0), runner.step(0)] == [0, 2, 0]
    letters = [codec.decode_as("DeadLetter", r.value or b"") for p in (0, 1) for r in bus.read("n.dead-letters", p)]
    assert [(letter["reason"], letter["detail"]) for letter in letters] == [
        ("unfoldable", "folding it raised ZeroDivisionError")
    ] * 2
    assert "counter slot 0 cannot fold n.in[0]@0: ZeroDivisionError at " in caplog.text


def test_storage_that_does_not_answer_is_asked_again_and_blames_no_record() -> None:
    class Away(Counter):
        tries = 0

        def time_of(self, view: object, record: object) -> None:
            self.tries += 1
            if self.tries < 3:
                raise StorageError("away")

    bus, told = MemoryBus({**TOPICS, "n.dead-letters": 2}), Listener()
    put(bus, 8)
    runner = StageRunner(bus, Away(), RunnerSettings("n", telemetry=told), backoff_s=0)
    for _ in range(12):
        runner.step(0)
    assert len(told.drops) == 2
    assert count(bus) == 8
    assert not [r for p in (0, 1) for r in bus.read("n.dead-letters", p)]


def test_it_runs_until_it_is_stopped() -> None:
    bus, stop = MemoryBus(TOPICS), threading.Event()
    thread = threading.Thread(target=run_stage, args=(bus, Counter(), RunnerSettings("n"), stop))
    thread.start()
    try:
        deadline = time.monotonic() + 20
        put(bus, 6)
        while count(bus) < 6:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        stop.set()
        thread.join(20)
    assert not thread.is_alive()
    assert bus.group("n.counter").members == ()
