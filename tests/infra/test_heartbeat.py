"""Processes say how they are, soon after a change, past a log that fails, and at their end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import groupby

from millrace.infra.errors import UnreachableError
from millrace.infra.heartbeat import BeatPace, Heartbeat, Standing, unless_in
from millrace.infra.log.base import Outgoing, Place, Publisher
from millrace.infra.log.memory.bus import MemoryBus
from millrace.infra.log.memory.write import MemoryPublisher
from millrace.schemas import codec

FAST = BeatPace(beat_s=0.01, lives_s=8.0)
SLOW = BeatPace(beat_s=3600.0, lives_s=8.0, farewell_s=15.0)


def poll_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def said(bus: MemoryBus) -> list[tuple[str, int | None, str | None]]:
    """What was said, repetitions left out."""
    found = (codec.decode_as("WorkerStatus", record.value or b"") for record in bus.read("t.workers", 0))
    return [key for key, _ in groupby((one["state"], one["version"], one["error"]) for one in found)]


def is_last(bus: MemoryBus, state: str) -> bool:
    found = said(bus)
    return bool(found) and found[-1][0] == state


def starting() -> Standing:
    return Standing("starting")


def beat(bus: MemoryBus, pace: BeatPace = FAST, standing: Callable[[], Standing] = starting) -> Heartbeat:
    made = Heartbeat(bus, "t", worker="w", role="learner", policy="p", standing=standing, pace=pace)
    made.start()
    return made


def test_a_change_is_said_at_once_and_the_end_too() -> None:
    bus = MemoryBus({"t.workers": 1})
    heart = beat(bus, SLOW)
    poll_until(lambda: len(said(bus)) == 1)
    heart.say("serving", 3)
    poll_until(lambda: len(said(bus)) == 2)
    heart.close(60, "out of memory")
    assert said(bus) == [("starting", None, None), ("serving", 3, None), ("failed", None, "out of memory")]
    last = codec.decode_as("WorkerStatus", list(bus.read("t.workers", 0))[-1].value or b"")
    assert last["expires_at"] - last["time"] == 15_000_000, "a failure can be seen for a while"


def test_trouble_is_told_while_it_lasts() -> None:
    bus, trouble = MemoryBus({"t.workers": 1}), [""]
    heart = beat(bus, standing=unless_in(lambda: trouble[0]))
    for text, state in (("", "serving"), ("x" * 500, "failed"), ("", "serving")):
        trouble[0] = text
        poll_until(partial(is_last, bus, state))
    heart.close(60)
    assert [state for state, _, _ in said(bus)] == ["serving", "failed", "serving", "stopped"]
    assert said(bus)[1][2] == "x" * 300


class Failing(MemoryBus):
    """Its first publishers fail: at once, by a delivery that fails, and by an answer that is late."""

    def __init__(self) -> None:
        super().__init__({"t.workers": 1})
        self.opened = 0

    def publisher(self, *, gapless: bool = False) -> Publisher:
        self.opened += 1
        if self.opened == 1:
            raise UnreachableError("no broker")
        return Broken(self, gapless=gapless) if self.opened == 2 else Late(self, gapless=gapless)


class Broken(MemoryPublisher):
    def publish(self, out: Outgoing) -> Future[Place]:
        lost: Future[Place] = Future()
        lost.set_exception(UnreachableError("timed out"))
        return lost


class Late(MemoryPublisher):
    late = True

    def flush(self, timeout_s: float = 30.0) -> None:
        if self.late:
            self.late = False
            raise UnreachableError("not yet")


def test_a_log_that_fails_is_tried_again_and_one_that_is_slow_is_kept() -> None:
    bus = Failing()
    heart = beat(bus)
    poll_until(lambda: len(list(bus.read("t.workers", 0))) >= 3)
    heart.close(60)
    assert said(bus) == [("starting", None, None), ("stopped", None, None)]
    assert bus.opened == 3


class Silent(MemoryBus):
    """Nobody gets an answer before `over` is set."""

    def __init__(self) -> None:
        super().__init__({"t.workers": 1})
        self.over = threading.Event()

    def publisher(self, *, gapless: bool = False) -> Publisher:
        self.over.wait(60)
        raise UnreachableError("no broker")


def test_a_log_that_never_answers_holds_nobody_up() -> None:
    bus = Silent()
    heart = beat(bus)
    heart.close(0.05)
    assert not said(bus)
    bus.over.set()
