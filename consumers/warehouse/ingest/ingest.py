"""Brings the log into the tables, exactly once in what a query sees, with no memory but the tables themselves.

    read -> cut into blocks -> sort to tables -> insert one part a block and table -> prove it in `blocks`

Invariants: a partition goes on behind the greatest offset that its table holds; a block's rows in every other table
(`unreadable`, `progress`) are written before those in the table that says how far the partition is, and each table
takes only what lies behind its own greatest offset, so whatever a kill comes between is made up for; one record that
cannot be read stops nothing; what the disk or the engine refuses is tried again from what the tables say. Where other
processes write to the same tables, every insert stands under a fence (`fences`), taken before the tables are asked.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from millrace.consumers.warehouse.ingest.avro_file import make_frame
from millrace.consumers.warehouse.ingest.blocks import Block, Cutter
from millrace.consumers.warehouse.ingest.proofs import Proof, unreadable_rows, write_proofs
from millrace.consumers.warehouse.ingest.shares import AllPartitions, Shares
from millrace.consumers.warehouse.ingest.table_choice import Behind, TableChooser, kind_of
from millrace.consumers.warehouse.ingest.topic_identity import Tip, recreation_reason, tips
from millrace.consumers.warehouse.store.base import Insertion, Store
from millrace.consumers.warehouse.store.drop import wait_for_deletes
from millrace.consumers.warehouse.store.fences import PROOFS, Fence, Where, insert_prefix, take_over
from millrace.consumers.warehouse.store.owner import confirm
from millrace.consumers.warehouse.store.tables import LOG, TABLES, RecordTable, position_of
from millrace.infra import faults
from millrace.infra.errors import BusError, StorageError, WarehouseError, WarehouseTaken
from millrace.infra.log.base import Bus, Record
from millrace.schemas import codec
from millrace.schemas.errors import SchemaError
from millrace.schemas.ids import new_id

log = logging.getLogger(__name__)

LINGER_S = 5.0
"""how long a record may wait for others of its block, once the log has been read to its end"""
LOOK_S = 10.0
"""between two looks for topics that are new"""
OPEN = 64 << 20
"""bytes of blocks that are open at once, while following"""
AGAIN_S = 2.0
"""before another try, after the log, the disk or the engine refused"""
POLL = 2000
UNREADABLE = "unreadable"
Row = tuple[int, bytes]
MEMORY = 241
"""what a length that is no length asks for, and what readers may have taken"""
ABOUT_BYTES = frozenset({32, 33, 36, 69, 117, 128, 131, 190, 321, 349, 395, 407, 748, 1001})
"""ClickHouse's codes for bytes that are not what they should be"""


class _ShareChange(Exception):
    """This process has another share of the partitions than when it began."""


class Ingest:
    """The topics of a namespace into a store, whose tables are there. behind: reads claims (`ClaimStore.behind`);
    shares: which partitions are this process's, by default all."""

    def __init__(self, bus: Bus, store: Store, namespace: str, behind: Behind, shares: Shares | None = None) -> None:
        self._bus = bus
        self._shares = shares or AllPartitions()
        self._store = store
        self._prefix = f"{namespace}."
        self._behind = behind
        self._have: dict[tuple[str, str, int], int] = {}
        """the greatest offset by table and partition"""
        self._tips: Mapping[Where, Tip] = {}
        self._proofs: list[Proof] = []
        self._mine: list[Where] = []
        """this process's partitions, of which it has asked how far they are"""
        self._fences: dict[Where, Fence] = {}
        self._id = new_id()
        self._doubtful: set[Where] = set()
        """partitions with an insert of which nobody knows what became"""
        self.rows = 0
        """rows that this process has written"""
        self.trouble = ""
        """why nothing comes in now; empty while all is well"""

    # -- once

    def catch_up(self) -> int:
        """Take in what the log holds when each partition's turn comes, one after the other; gives the rows written."""
        before = self.rows
        self.resume()
        for where in self._mine:
            self._read(where)
        self._prove()
        return self.rows - before

    def resume(self) -> None:
        """Make sure of this process's partitions, then learn from the tables how far they are."""
        self._mine = list(self._partitions())
        if self._store.is_shared:
            self._fence(self._mine)
            confirm(self._store, self._prefix.removesuffix("."))  # only now: `take` shuts out who has a fence
        wait_for_deletes(self._store)
        self._proofs.clear()
        self._have.clear()
        self._tips = tips(self._store, self._prefix.removesuffix("."))
        for name in (*(table.name for table in TABLES), UNREADABLE):
            for topic, part, last in self._store.rows(f"SELECT topic, part, max(off) FROM {LOG}.{name} GROUP BY ALL"):
                self._have[name, topic, part] = last
        forgetful = self._store.rows(
            f"SELECT table, topic, part, max(last) FROM {LOG}.blocks WHERE table IN (SELECT name FROM system.tables"
            f" WHERE database = '{LOG}' AND position(engine_full, ' TTL ') > 0) GROUP BY ALL"
        )
        for name, topic, part, last in forgetful:  # its newest rows may be forgotten already
            self._have[name, topic, part] = max(last, self._have.get((name, topic, part), -1))

    def _fence(self, partitions: Sequence[Where]) -> None:
        """Take over what this process does not hold yet, or wrote to without an answer."""
        self._fences = {
            where: self._fences[where] for where in partitions if where in self._fences.keys() - self._doubtful
        }
        takeovers = [where for where in partitions if where not in self._fences]
        holder = f"{socket.gethostname()}-{os.getpid()}-{new_id()}"
        take_over(self._store, holder, takeovers)
        self._fences |= {where: Fence(*where, holder) for where in takeovers}
        self._doubtful.clear()

    def _partitions(self) -> Iterator[Where]:
        """This process's partitions of every topic that has a table."""
        for topic in self._bus.topics(self._prefix):
            if kind_of(topic.removeprefix(self._prefix)) is not None:
                for part in range(self._bus.partitions(topic)):
                    if self._shares.has(topic, part):
                        yield topic, part

    def _position(self, where: Where) -> int:
        """The offset that a partition goes on from."""
        return self._have.get((self._main(where[0]).name, *where), -1) + 1

    def _read(self, where: Where) -> None:
        self._compare(where)
        cutter = Cutter(*where)
        for record in self._bus.read(*where, self._position(where)):
            self._write_all(cutter.add(record))
        if rest := cutter.rest():
            self._write(rest)

    def _compare(self, where: Where) -> None:
        """Say what the log has forgotten before it was read. Raises WarehouseError where the topic is another one."""
        topic, part = where
        position, start = self._position(where), self._bus.starts(topic)[part]
        if why := recreation_reason(self._bus, where, position, self._tips.get(where)):
            raise WarehouseError(
                f"{topic} partition {part} {why}: the topic was made anew. `millrace warehouse rebuild --forget` makes "
                f"the tables in {self._store.where} of what the log holds now, without the rows of the former topic"
            )
        if start > position:
            log.warning("%s[%d]: the log has forgotten offsets %d to %d", topic, part, position, start - 1)

    # -- for good

    def follow(self, over: threading.Event) -> None:
        """Catch up, then take in what comes, until `over`. What fails is tried again from what the tables say."""
        while not over.is_set():
            try:
                self._shares.look(LOOK_S / 100)
                self.catch_up()
                self.trouble = ""
                self._follow(over)
            except _ShareChange:
                log.info("the warehouse processes share the partitions anew")
            except WarehouseTaken as taken:  # the group has not told yet, or has told the other one later than this one
                log.info("%s", taken)
                over.wait(AGAIN_S)
            except (BusError, StorageError, WarehouseError) as error:
                if str(error) != self.trouble:
                    log.warning("the warehouse waits: %s", error)
                self.trouble = str(error)
                over.wait(AGAIN_S)

    def _follow(self, over: threading.Event) -> None:
        """Take in what comes, until `over` or until there are partitions that are new: policies come meanwhile."""
        cutters = {where: Cutter(*where) for where in self._mine}
        since: dict[Where, float] = {}
        last_look = time.monotonic()
        with self._bus.tail({where: self._position(where) for where in cutters}) as tail:
            while not over.is_set():
                for record in tail.poll(POLL, min(LINGER_S, 0.5)):
                    where = record.topic, record.partition
                    since.setdefault(where, time.monotonic())
                    for block in cutters[where].add(record):
                        self._write(block)
                        since.pop(where)
                        if cutters[where].size:
                            since[where] = time.monotonic()
                now = time.monotonic()
                for where in self._partitions_to_close(cutters, since, now):
                    self._write_all(filter(None, [cutters[where].rest()]))
                    since.pop(where, None)
                self._stay()
                if now - last_look > LOOK_S:
                    last_look = now
                    self._prove()
                    if any(where not in cutters for where in self._partitions()):
                        break
            self._write_all(filter(None, [cutter.rest() for cutter in cutters.values()]))
            self._prove()

    def _stay(self) -> None:
        """Raises _ShareChange once this process has another share."""
        if self._shares.look():
            raise _ShareChange

    @staticmethod
    def _partitions_to_close(cutters: dict[Where, Cutter], since: dict[Where, float], now: float) -> list[Where]:
        """Partitions whose open block has waited long enough; the largest ones too while all are too large."""
        partitions = [where for where, began in since.items() if now - began >= LINGER_S]
        size = sum(cutters[where].size for where in since if where not in partitions)
        for where in sorted(since, key=lambda partition: -cutters[partition].size):
            if size <= OPEN:
                break
            if where not in partitions:
                partitions.append(where)
                size -= cutters[where].size
        return partitions

    # -- a block

    def _write_all(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self._write(block)

    def _write(self, block: Block) -> None:
        """Write a block's rows, those of the table that says how far the partition is last."""
        self._stay()
        main, before = self._main(block.topic), self.rows
        outcome = TableChooser(self._kind(block.topic), self._behind).sort(block.records)
        unreadable = outcome.unreadable
        for table, rows in outcome.rows.items():
            if table is not main:
                unreadable += self._take(table, block, rows, report=None)
        main_rows = outcome.rows.get(main, [])
        if unreadable:  # whatever cannot be read is told of at once, before the table says that the block is done
            unreadable += self._find_unreadable(main, block, main_rows)
            self._tell(block, unreadable)
            offsets = {record.offset for record, _ in unreadable}
            main_rows = [row for row in main_rows if row[0] not in offsets]
        if refusals := self._take(main, block, main_rows, report=partial(self._tell, block)):
            unreadable += refusals
            offsets = {record.offset for record, _ in refusals}
            main_rows = [row for row in main_rows if row[0] not in offsets]
        self._have[main.name, block.topic, block.part] = block.until - 1
        if self.rows > before or unreadable:
            self._proofs.append(Proof.of(main.name, block, [row for _, row in main_rows]))

    def _take(
        self,
        table: RecordTable,
        block: Block,
        rows: Sequence[tuple[int, bytes]],
        report: Callable[[list[tuple[Record, str]]], None] | None,
    ) -> list[tuple[Record, str]]:
        """Insert those rows of a block that a table lacks; gives what cannot be read, which `report` hears of before
        the others are in."""
        last = self._have.get((table.name, block.topic, block.part), -1)
        rows = [row for row in rows if row[0] > last]
        if not rows:
            return []
        unreadable: list[tuple[Record, str]] = []
        faults.point("warehouse.before_insert")
        try:
            self._insert(table, block, rows)
        except WarehouseTaken:
            raise
        except WarehouseError:
            unreadable = self._find_unreadable(table, block, rows)
            if not unreadable:
                raise
            if report is not None:
                report(unreadable)
            offsets = {record.offset for record, _ in unreadable}
            rows = [row for row in rows if row[0] not in offsets]
            if rows:
                self._insert(table, block, rows)
        faults.point("warehouse.after_insert")
        if rows:
            self._have[table.name, block.topic, block.part] = rows[-1][0]
        self.rows += len(rows)
        return unreadable

    def _insert(self, table: RecordTable, block: Block, rows: Sequence[tuple[int, bytes]]) -> None:
        frame = make_frame(table, block.topic, block.part, [row for _, row in rows])
        self._send((block.topic, block.part), frame.into, frame.pieces, f"{table.name}-{rows[0][0]}")

    def _send(self, where: Where, into: Insertion, pieces: Sequence[bytes], suffix: str) -> None:
        """Insert rows of a partition, while it is this process's."""
        if self._store.is_shared:
            into = replace(into, where=f"{self._fences[where].condition} AND {into.where}")
        self._doubtful.add(where)
        self._store.insert(into, pieces, f"{insert_prefix(where)}{suffix}-{self._id}")
        self._doubtful.discard(where)

    def _find_unreadable(
        self, table: RecordTable, block: Block, rows: Sequence[tuple[int, bytes]]
    ) -> list[tuple[Record, str]]:
        """Which of these rows no table can take, found without writing any."""

        def attempt(some: Sequence[tuple[int, bytes]]) -> None:
            frame = make_frame(table, block.topic, block.part, [row for _, row in some], dry=True)
            self._store.insert(frame.into, frame.pieces, f"{insert_prefix((block.topic, block.part))}dry-{self._id}")

        records = {record.offset: record for record in block.records}
        return [(records[offset], reason) for offset, reason in undecodable(rows, attempt, records, self._behind)]

    def _tell(self, block: Block, unreadable: list[tuple[Record, str]]) -> None:
        """Name what cannot be read."""
        last = self._have.get((UNREADABLE, block.topic, block.part), -1)
        news = sorted((pair for pair in unreadable if pair[0].offset > last), key=lambda pair: pair[0].offset)
        if not news:
            return
        for record, reason in news:
            log.error("%s[%d]@%d is passed over: %s", record.topic, record.partition, record.offset, reason)
        self._send((block.topic, block.part), *unreadable_rows(news), f"{UNREADABLE}-{news[0][0].offset}")
        self._have[UNREADABLE, block.topic, block.part] = news[-1][0].offset
        faults.point("warehouse.after_unreadable")

    def _prove(self) -> None:
        """Write down what was done, while all of it is this process's: a table whose rows are forgotten in time is
        believed to be as far as `blocks` says."""
        if self._proofs:
            write_proofs(self._store, self._proofs, self._fences, f"{PROOFS}{self._prefix}{self._id}")
            self._proofs.clear()
            faults.point("warehouse.after_proof")

    # -- names

    def _kind(self, topic: str) -> str:
        kind = kind_of(topic.removeprefix(self._prefix))
        assert kind is not None, topic
        return kind

    def _main(self, topic: str) -> RecordTable:
        """The table that says how far a topic is."""
        return position_of(self._kind(topic))


def undecodable(
    rows: Sequence[Row], attempt: Callable[[Sequence[Row]], None], records: Mapping[int, Record], behind: Behind
) -> list[tuple[int, str]]:
    """Offsets and reasons of rows that cannot be read. `attempt` raises WarehouseError for rows of which one cannot.
    Raises what it raises where that is not about the bytes of a row.

    Invariant: whether a row is sound, and why not, depends on its bytes alone, never on its neighbours, the disk or the
    memory of the moment."""
    if not rows:
        return []
    try:
        attempt(rows)
    except WarehouseError as error:
        if len(rows) > 1:
            half = len(rows) // 2
            return [
                *undecodable(rows[:half], attempt, records, behind),
                *undecodable(rows[half:], attempt, records, behind),
            ]
        offset = rows[0][0]
        fault = _fault(records[offset], behind)
        if error.code in ABOUT_BYTES or (error.code == MEMORY and fault):
            return [(offset, fault or f"ClickHouse cannot read it (code {error.code})")]
        raise
    return []


def _fault(record: Record, behind: Behind) -> str:
    """Why a record does not decode, empty where it does. What the engine says of it would not do: that depends on the
    number behind the row too."""
    try:
        content: dict[str, Any]
        name, content = codec.decode(behind(record.value or b""))
        if name == "Event" and content["body_encoding"] == "plain":
            codec.decode(content["body"])
    except SchemaError as error:
        return str(error)
    return ""
