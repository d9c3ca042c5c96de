"""The receiver's two logs: killed anywhere and started again, everything taken is in the events once."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.dialects.all import DIALECTS
from millrace.dialects.base import Dialect
from millrace.formats.spans.otlp_json import Span
from millrace.infra import faults
from millrace.infra.config import Settings
from millrace.infra.log.memory.bus import MemoryBus
from millrace.producers.capture.log import CaptureLog, LogFull
from millrace.producers.intake.otlp import serve
from millrace.producers.intake.otlp.assembler import Assembler
from millrace.producers.intake.otlp.receiver import OtlpReceiver
from millrace.schemas import codec
from millrace.schemas.chain import event_hash
from millrace.schemas.ids import new_id
from tests.support.fault_points import fault_points
from tests.support.spans import TRACES, Folded, a_call, a_span, an_evaluation, conversations, read_spans

POINTS = ("otlp.taken", "otlp.closed", "otlp.written", "capture.appended", "capture.acked")
QUIET = 10


class Killed(BaseException):
    """The process is gone."""


class Clock:
    """Goes on only when told to."""

    def __init__(self) -> None:
        self.now = 1

    def __call__(self) -> int:
        return self.now


def opened(folder: Path, clock: Clock, **sizes: Any) -> OtlpReceiver:
    """The receiver over a folder. Lets go of it when it is killed while it starts."""
    spans = CaptureLog(folder / "spans", name="otlp", **sizes)
    events = CaptureLog(folder / "events", name="otlp")
    try:
        return OtlpReceiver(spans, events, Assembler("p", QUIET), clock=clock)
    except Killed:
        spans.close()
        events.close()
        raise


def written(receiver: OtlpReceiver) -> list[tuple[str, str, int, bytes]]:
    """What tells events apart, of all that is in the log. Checks chain and numbers."""
    out = []
    links: dict[str, bytes] = {}
    for number, kept in enumerate(receiver.events.read()):
        event = codec.decode_as("Event", kept.entry.value)
        assert event["source_seq"] == number == int(kept.entry.headers["source-seq"])
        assert event["prev_hash"] == links.get(event["trajectory"], b"")
        assert event["hash"] == event_hash(event["prev_hash"], event)
        links[event["trajectory"]] = event["hash"]
        out.append((event["id"], event["trajectory"], event["step"], event["body"]))
    return out


def test_there_are_points_to_be_killed_at() -> None:
    assert {name for name in fault_points("producers") if name.startswith("otlp.")} <= set(POINTS)


@given(conversations(), st.randoms(use_true_random=False), st.lists(st.integers(1, 40), max_size=5))
@settings(max_examples=60, deadline=None)
def test_killed_at_any_point_each_event_is_there_once(
    tmp_path_factory: pytest.TempPathFactory, given: list[Any], chance: random.Random, kills: list[int]
) -> None:
    spans = read_spans(given)
    chance.shuffle(spans)
    cut = chance.randint(0, len(spans))
    batches = [spans[:cut], spans[cut:]]
    expected = Folded(QUIET)
    expected.took(spans, 1)
    expected.close(1 + QUIET)
    folder, clock, left = tmp_path_factory.mktemp("killed"), Clock(), list(kills)
    count = left.pop() if left else 0

    def hook(name: str) -> None:
        nonlocal count
        if name in POINTS and count:
            count -= 1
            if not count:
                raise Killed

    before = faults.install(hook)
    receiver: OtlpReceiver | None = None
    try:
        waiting = list(batches)
        done = False
        while not done:
            try:
                receiver = opened(folder, clock)
                while waiting:
                    receiver.take("local", waiting[0])  # whoever is not answered sends again
                    waiting.pop(0)
                clock.now = 1 + QUIET
                receiver.close_due()
                done = True
            except Killed:
                if receiver is not None:
                    receiver.close()
                    receiver = None
                count = left.pop() if left else 0
        assert receiver is not None
        faults.install(before)
        found = written(receiver)
        receiver.close()
        again = opened(folder, clock)  # a start adds nothing
        again.close_due(ends_all=True)
        assert written(again) == found
        again.close()
    finally:
        faults.install(before)
    assert sorted(one[:3] for one in found) == sorted(one[:3] for one in expected.told)


def call(number: int, asked: str = "q") -> list[Span]:
    return read_spans([a_span(number, a_call(asked, "a", f"r{number}"))])


def test_a_full_log_takes_nothing_and_loses_nothing(tmp_path: Path) -> None:
    clock = Clock()
    receiver = opened(tmp_path, clock, max_waiting=5000)
    receiver.take("local", call(1))
    with pytest.raises(LogFull):
        receiver.take("local", call(2, "x" * 6000))
    clock.now += QUIET
    assert receiver.close_due() == 1
    receiver.take("local", call(3, "x" * 4000))  # what is over makes room
    receiver.close_due(ends_all=True)
    assert len({one[1] for one in written(receiver)}) == 2
    receiver.close()


def test_events_that_find_no_room_are_written_later(tmp_path: Path) -> None:
    clock = Clock()
    receiver = opened(tmp_path, clock)
    receiver.take("local", call(1))
    receiver.events.max_waiting = 0
    clock.now += QUIET
    receiver.close_due()
    assert receiver.trouble
    assert [one[2] for one in written(receiver)] == []
    assert receiver.spans.acked == 0
    receiver.events.max_waiting = 1 << 30
    receiver.close_due()
    assert (receiver.trouble, len(written(receiver))) == ("", 3)
    assert receiver.spans.acked == receiver.spans.end
    receiver.close()


def test_a_late_reward_goes_on_with_the_chain_after_a_start(tmp_path: Path) -> None:
    clock = Clock()
    receiver = opened(tmp_path, clock)
    receiver.take("local", call(1))
    clock.now += QUIET
    receiver.close_due()
    receiver.close()
    again = opened(tmp_path, clock)
    for _ in range(2):
        again.take("local", read_spans([an_evaluation(9, 0.5, **{"gen_ai.response.id": "r1"})]))
    found = written(again)
    assert [one[2] for one in found] == [0, 1, 2, 3]
    assert Counter(one[1] for one in found).total() == 4
    again.close()


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_spans_of_calls_that_the_gateway_captured_begin_no_episode(tmp_path: Path, dialect: Dialect) -> None:
    """Whatever API the agent spoke: the receiver knows the ids that the gateway makes."""
    made = Settings.model_validate({"home": tmp_path})
    receiver, _ = serve.open_receiver(made, MemoryBus())
    for number, id in enumerate([f"{dialect.prefix}{new_id()}", f"{dialect.prefix}01abc"]):
        receiver.take("local", read_spans([a_span(1, a_call("q", "a", id), trace=TRACES[number])]))
        receiver.close_due(ends_all=True)
        kinds = Counter(kept.entry.headers["kind"] for kept in receiver.events.read())
        assert kinds["model_call"] == number
    receiver.close()
