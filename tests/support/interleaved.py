"""Several warehouse processes on one server, step by step: the code of `Ingest` itself on a bus in memory, and a model
of the server as far as the fences need it.

A process is a thread that runs only while `step` lets it, up to its next call of the server or look at the clock. A
statement that it sent is a thing of its own, which goes on when its process is paused or dead:

    under way -> listed as running -> asked for its fence -> rows there -> no longer listed

So processes can be paused for as long as one likes, killed, dropped by the group, and left without an answer."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from clickhouse_connect.driver.client import Client
from fastavro import reader

from millrace.consumers.warehouse.ingest.ingest import Ingest
from millrace.consumers.warehouse.ingest.shares import GroupShares, group_of
from millrace.consumers.warehouse.store.base import Insertion, Store
from millrace.infra.errors import WarehouseError, WarehouseTaken
from millrace.infra.log.memory.bus import MemoryBus

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

    shared = True
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
