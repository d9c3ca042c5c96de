"""Processes that share a server: however they die, pause, wake and lose answers, no row is doubled and none lost."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.consumers.warehouse.ingest import blocks as cutting
from millrace.consumers.warehouse.ingest import ingest as under_test
from millrace.consumers.warehouse.store import fences
from millrace.infra.log.base import Outgoing, TopicSpec
from millrace.infra.log.memory.bus import MemoryBus
from millrace.schemas import codec
from tests.support.history import History
from tests.support.interleaved import NS, Process, Server, Statement, finished
from tests.support.warehouse import first

EVENTS, GRANTS = f"{NS}.events", f"{NS}.pico.grants"
PARTS = {EVENTS: 2, GRANTS: 3}
EACH = 7
STAGES = ("under way", "listed", "asked", "there")
"""of an insert, each before its next step"""
PROGRESS = codec.encode("Progress", {"stage": "seal", "slot": 0, "time": 0})
KINDS = ("events", "progress", "unreadable")


@pytest.fixture(autouse=True, scope="module")
def at_once() -> Iterator[None]:
    """Blocks of three records, and no waiting."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutting, "SPAN", 3)
        for name in ("LINGER_S", "AGAIN_S", "LOOK_S"):
            patch.setattr(under_test, name, 0.0)
        yield


@cache
def records() -> dict[str, bytes]:
    """A record for each table."""
    made = History(1, versions=1)
    return {"events": first(made, "events"), "grants": first(made, "grants"), "progress": PROGRESS, "unreadable": b"?"}


def table_at(topic: str, offset: int) -> str:
    """Which table an offset goes to: blocks of events have rows for three."""
    return KINDS[offset * offset % 7 % len(KINDS)] if topic == EVENTS else "grants"


def log() -> MemoryBus:
    """Some partitions, with records for all these tables."""
    bus = MemoryBus()
    bus.ensure_topics([TopicSpec(topic, parts) for topic, parts in PARTS.items()])
    publisher = bus.publisher()
    for _, topic, part, offset in sorted(WANTED, key=lambda row: row[1:]):
        value = records()[table_at(topic, offset)]
        assert publisher.publish(Outgoing(topic, b"k", value, partition=part)).result().offset == offset
    return bus


WANTED = {
    (table_at(topic, offset), topic, part, offset): 1
    for topic, parts in PARTS.items()
    for part in range(parts)
    for offset in range(EACH)
}


def faults(server: Server) -> dict[object, int]:
    """Rows that are not there exactly once."""
    found = Counter(row for row in server.rows if row[0] != "blocks")
    return {row: found[row] for row in {**found, **WANTED} if found[row] != 1}


def all_in(server: Server, *processes: Process) -> None:
    """Let everything go on until all rows have come in, and a while longer."""
    left = 40
    for _ in range(5000):
        left -= len(set(server.rows) & WANTED.keys()) == len(WANTED)
        if not left:
            return
        for process in processes:
            process.step()
        finished([each for each in server.statements if not each.done])
    raise AssertionError(f"not all came in: {faults(server)}, {[process.at for process in processes]}")


def inserting(server: Server, process: Process, stage: str) -> Statement:
    """Let it go on until a statement of rows stands at a stage."""
    for _ in range(500):
        found = [each for each in server.statements if not each.done]
        if found and process.sent is found[-1]:
            while found[-1].stage != stage:
                found[-1].step()
            return found[-1]
        process.step()
    raise AssertionError(process.at)


def anything(chance: random.Random, server: Server) -> None:
    """Let up to three processes go on in any order, while some are paused, die, wake, or lose an answer."""
    bus = log()
    awake = [Process(bus, server, f"p{number}") for number in range(chance.randint(2, 3))]
    asleep: list[Process] = []
    try:
        for number in range(chance.randint(5, 30)):
            process = chance.choice(awake)
            for _ in range(chance.randint(1, 80)):
                process.on()
            if chance.random() < 0.7:  # what follows is worst in the middle of an insert
                for _ in range(200):
                    if process.sent is not None and process.sent.stage == chance.choice(STAGES):
                        break
                    process.on()
            match chance.choices(("sleep", "wake", "lose", "drop", "kill"), (4, 3, 1, 1, 2))[0]:
                case "sleep" if len(awake) > 1:
                    awake.remove(process)
                    asleep.append(process)
                    process.drop()
                case "wake" if asleep:
                    awake.append(asleep.pop(chance.randrange(len(asleep))))
                case "lose" if process.sent is not None:
                    process.sent.lost = True
                    process.step()
                case "drop":
                    process.drop()
                case "kill":
                    process.kill()
                    awake.remove(process)
                    awake.append(Process(bus, server, f"{number}"))
        all_in(server, *awake, *asleep)
    finally:
        for process in (*awake, *asleep):
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("many", [1, 3])
@settings(max_examples=60)
@given(chance=st.randoms(use_true_random=False))
def test_no_schedule_doubles_or_loses_a_row(many: int, chance: random.Random) -> None:
    """However early former holders are forgotten, and however late that comes about."""
    server = Server()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fences, "MANY", many)
        anything(chance, server)
    assert faults(server) == {}


def holders(server: Server, takeovers: int) -> None:
    """Let processes take everything over, one after the other."""
    for number in range(takeovers):
        process = Process(log(), server, f"p{number}")
        process.until("inserts")
        process.kill()
        finished([each for each in server.statements if not each.done])


def test_fences_stay_few_however_often_partitions_are_taken_over() -> None:
    server = Server()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fences, "MANY", 4)
        holders(server, 15)
    rows = Counter((topic, part) for topic, part, *_ in server.fences)
    assert len(rows) == sum(PARTS.values())
    assert max(rows.values()) <= 4 + 1
    assert server.trimmed >= 3


def test_forgetting_the_newest_too_would_be_seen() -> None:
    """The model finds a holder that deletes its own row."""
    server, sound = Server(), fences.older
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fences, "MANY", 1)
        patch.setattr(fences, "older", lambda epochs: sound(epochs).replace("<", "<="))
        holders(server, 2)
    assert server.newest(EVENTS, 0) == ""


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("settles", "fenced"), [(True, True), (False, True), (True, False)])
def test_a_process_that_wakes_in_the_middle_of_an_insert(stage: str, settles: bool, fenced: bool) -> None:
    """Without the fence an insert that comes late doubles, without the wait one that was let through just before."""
    bus, server = log(), Server(settles=settles, fenced=fenced)
    zombie = Process(bus, server, "zombie")
    late = inserting(server, zombie, stage)
    zombie.drop()
    heir = Process(bus, server, "heir")
    try:
        for _ in range(2000):
            heir.step()
            finished([each for each in server.statements if each is not late and not each.done])
            if heir.at == "waits" or not WANTED.keys() - set(server.rows):
                break
        waited = heir.at == "waits"
        finished([late])
        all_in(server, heir, zombie)
        doubled = bool(faults(server))
        assert doubled == (
            (stage == "under way" and not fenced)
            or (stage == "listed" and not settles and not fenced)
            or (stage == "asked" and not settles)
        )
        assert waited == (settles and stage in ("listed", "asked", "there"))
    finally:
        zombie.kill()
        heir.kill()


def test_processes_share_what_there_is() -> None:
    bus, server = log(), Server()
    processes = [Process(bus, server, name) for name in ("one", "two")]
    try:
        for process in processes:
            process.until("asks")
        all_in(server, *processes)
        assert faults(server) == {}
        holders = {server.newest(topic, part) for topic, parts in PARTS.items() for part in range(parts)}
        assert len(holders) == 2
    finally:
        for process in processes:
            process.kill()
