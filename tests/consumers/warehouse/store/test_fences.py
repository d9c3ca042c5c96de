"""Processes that share a server: however they die, pause, wake and lose answers, no row is doubled and none lost.

What runs is the code of `Ingest` itself on a bus in memory, and a model of the server as far as the fences need it. A
process is a thread that runs only while `step` lets it, up to its next call of the server or look at the clock. A
statement that it sent is a thing of its own, which goes on when its process is paused or dead:

    under way -> listed as running -> asked for its fence -> rows there -> no longer listed

So processes can be paused for as long as one likes, killed, dropped by the group, and left without an answer."""

from __future__ import annotations

import io
import random
import re
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import pytest
from clickhouse_connect.driver.client import Client
from fastavro import reader
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.consumers.warehouse.ingest import blocks as cutting
from millrace.consumers.warehouse.ingest import ingest as under_test
from millrace.consumers.warehouse.ingest.ingest import Ingest
from millrace.consumers.warehouse.ingest.shares import GroupShares, group_of
from millrace.consumers.warehouse.store import fences
from millrace.consumers.warehouse.store.base import Insertion, Store
from millrace.infra.errors import WarehouseError, WarehouseTaken
from millrace.infra.log.base import Outgoing, TopicSpec
from millrace.infra.log.memory.bus import MemoryBus
from millrace.schemas import codec
from tests.support.history import History
from tests.support.warehouse import first

NS = "test"
_FENCE = re.compile(r"topic = '([^']*)' AND part = (\d+)\) != '([^']*)'")
_VALUES = re.compile(r"\('([^']*)', (\d+), (\d+), '([^']*)', now64")
_OLDER = re.compile(r"topic = '([^']*)' AND part = (\d+) AND epoch (<=?) (\d+)")
_WHERE = re.compile(r"millrace_log\.(\w+)")


class Died(BaseException):
    """kill -9."""


class Server:
    """What all processes see. `settles`, `fences`: whether it protects as it should; switched off for mutants."""

    def __init__(self, *, settles: bool = True, fenced: bool = True) -> None:
        self.settles, self.fenced = settles, fenced
        self.rows: list[tuple[str, str, int, int]] = []
        """table, topic, partition and offset of every row, doubled ones too"""
        self.fences: list[tuple[str, int, int, str]] = []
        self.trimmed = 0
        """how often rows of former holders were deleted"""
        self.running: list[str] = []
        self.statements: list[Statement] = []

    def newest(self, topic: str, part: int) -> str:
        """Who holds a partition."""
        found = [(epoch, holder) for t, p, epoch, holder in self.fences if (t, p) == (topic, part)]
        return max(found)[1] if found else ""


class Statement:
    """One INSERT, on its way and at the server. `stage` says how far it is."""

    def __init__(self, server: Server, query_id: str, rows: Sequence[tuple[str, str, int, int]], where: str) -> None:
        self.stage = "under way"
        self.refused = self.lost = False
        self._steps = self._run(server, query_id, rows, where)
        server.statements.append(self)

    @property
    def done(self) -> bool:
        return self.stage == "done"

    def step(self) -> None:
        """One step on."""
        self.stage = next(self._steps)

    def _run(
        self, server: Server, query_id: str, rows: Sequence[tuple[str, str, int, int]], where: str
    ) -> Iterator[str]:
        server.running.append(query_id)
        yield "listed"
        fences = _FENCE.findall(where) if server.fenced else ()
        self.refused = any(server.newest(topic, int(part)) != holder for topic, part, holder in fences)
        yield "asked"
        if not self.refused:
            server.rows += rows
        yield "there"
        server.running.remove(query_id)
        yield "done"


class ModelStore(Store):
    """One process's way to the server."""

    is_shared = True
    where = "the model"

    def __init__(self, server: Server, switch: Callable[[str], None]) -> None:
        self._server, self._switch = server, switch
        self.sent: Statement | None = None
        """what it waits for"""

    def insert(self, into: Insertion, data: Sequence[bytes], query_id: str) -> None:
        found = [dict(row) for row in reader(io.BytesIO(b"".join(data)))]  # type: ignore[arg-type]
        table, place = into.table.removeprefix("millrace_log."), _FENCE.search(into.where)
        if table == "blocks":
            rows = [(table, row["topic"], row["part"], row["last"]) for row in found]
        else:
            offsets = [row["off"] if "off" in row else int.from_bytes(row["_off"], "little") for row in found if place]
            rows = [(table, place[1], int(place[2]), offset) for offset in offsets] if place else []
        statement = self.sent = Statement(self._server, query_id, rows, into.where)
        while not statement.done:
            self._switch("inserts")
            if statement.lost:
                self.sent = None
                raise WarehouseError("no answer")
        self.sent = None
        self._switch("inserted")
        if statement.refused:
            raise WarehouseTaken("taken over")

    def settle(self, query_ids: Sequence[str]) -> None:
        self._switch("settles")
        while self._server.settles and any(each.startswith(tuple(query_ids)) for each in self._server.running):
            self._switch("waits")

    def rows(self, sql: str, parameters: Mapping[str, Any] | None = None, database: str = "") -> list[tuple[Any, ...]]:
        self._switch("asks")
        name = _WHERE.search(sql)
        found: dict[tuple[str, int], int] = {}
        if "max(epoch)" in sql:
            fences = self._server.fences
            places = {(topic, part) for topic, part, *_ in fences}
            there = {where: [epoch for *at, epoch, _ in fences if (*at,) == where] for where in places}
            return [(*where, max(epochs), len(epochs)) for where, epochs in there.items()]
        if "max(off)" in sql and name:
            for table, topic, part, offset in self._server.rows:
                if table == name[1]:
                    found[topic, part] = max(offset, found.get((topic, part), -1))
        return [(*where, most) for where, most in found.items()]

    def run(self, sql: str, database: str = "default") -> None:
        if "DELETE" in sql:  # done at any time later, or never
            self._switch("trims")
            gone = [(t, int(p), sign, int(epoch)) for t, p, sign, epoch in _OLDER.findall(sql)]
            self._server.fences = [
                row
                for row in self._server.fences
                if not any(row[:2] == (t, p) and row[2] < epoch + (sign == "<=") for t, p, sign, epoch in gone)
            ]
            self._server.trimmed += 1
            return
        self._switch("takes over")
        self._server.fences += [(t, int(p), int(epoch), holder) for t, p, epoch, holder in _VALUES.findall(sql)]
        self._switch("took over")

    def client(self, database: str = "") -> Client:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing is held."""


class Process:
    """A warehouse process, which runs in `step` alone. `at` says where it stands."""

    def __init__(self, bus: MemoryBus, server: Server, name: str) -> None:
        self.name, self.at, self.ended = name, "begins", False
        self._bus, self._dying = bus, False
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._store = ModelStore(server, self._switch)
        self._ingest = Ingest(bus, self._store, NS, lambda data: data, GroupShares(bus, NS, name))
        threading.Thread(target=self._run, daemon=True).start()

    def step(self) -> None:
        """Let it run to its next stop."""
        self._go.release()
        self._back.acquire()

    @property
    def sent(self) -> Statement | None:
        """The insert that it waits for."""
        return self._store.sent

    def on(self) -> None:
        """One step on, of what it waits for or of itself."""
        if self.sent is not None and not self.sent.done:
            self.sent.step()
        else:
            self.step()

    def until(self, at: str, most: int = 500) -> None:
        """Let it run until it stands somewhere."""
        for _ in range(most):
            if self.at == at:
                return
            self.step()
        raise AssertionError(f"{self.name} never {at}, but {self.at}")

    def drop(self) -> None:
        """The group hears nothing of it for too long."""
        for member in self._bus.group(group_of(NS)).members:
            if member.client_id == self.name:
                self._bus.expel(group_of(NS), member.member_id)

    def kill(self) -> None:
        """kill -9; what it has sent goes on."""
        self._dying = True
        while not self.ended:
            self.step()
        self.drop()

    def _switch(self, at: str) -> None:
        self.at = at
        self._back.release()
        self._go.acquire()
        if self._dying:
            raise Died

    def _run(self) -> None:
        self._go.acquire()
        try:
            self._ingest.follow(_Over(self._switch))
        except Died:
            pass
        finally:
            self.ended = True
            self._back.release()


class _Over(threading.Event):
    """Never set; whoever asks is stopped."""

    def __init__(self, switch: Callable[[str], None]) -> None:
        super().__init__()
        self._switch = switch

    def is_set(self) -> bool:
        self._switch("idle")
        return False

    def wait(self, timeout: float | None = None) -> bool:
        self._switch("tries again")
        return False


def finished(statements: Collection[Statement]) -> None:
    """Every statement comes to its end."""
    for statement in statements:
        while not statement.done:
            statement.step()


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
