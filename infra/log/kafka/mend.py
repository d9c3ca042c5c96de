"""Transactions that a broker decided and then forgot to end, ended as they were decided.

A lone broker that is killed between deciding a transaction and writing its markers loads that decision on its next
start while it still believes it leads its partitions, then finds them leaderless for a moment, takes them for deleted
and marks the transaction as complete without its markers (Apache Kafka 4.4: "these partitions are likely deleted
already and hence can be skipped"; 6 of 14 kills right after a commit). Readers then wait in front of records that were
committed, for ever if their writer never writes there again; and if it does, what it writes next and the forgotten are
ended together, as the next transaction ends.

Invariants: only a transaction is touched whose coordinator is done with it, on a partition that stood still between two
calls or whose writer has just fenced itself; and only with the decision that the coordinator's own log holds for that
partition. A new owner mends what its own id left before it writes. An owner that lives on begins a transaction only
when the leaders say that its last one is ended wherever it wrote: a marker outlives its broker, so that from then on
nothing of it can be forgotten. Brokers behind TLS or another login than SASL/PLAIN, and those that do not know the
requests of `wire`, are left to their operators.
"""

from __future__ import annotations

import logging
import struct
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from millrace.infra.errors import UnreachableError
from millrace.infra.log.base import Record
from millrace.infra.log.kafka.wire import (
    DESCRIBE_PRODUCERS,
    DESCRIBE_TRANSACTIONS,
    WRITE_MARKERS,
    BrokerConnection,
    FlexibleReader,
    Open,
    Where,
)

log = logging.getLogger(__name__)

STATES = "__transaction_state"
OFFSETS = "__consumer_offsets"
"""where transactions commit the offsets of groups"""
NEEDED_REQUESTS = {WRITE_MARKERS, DESCRIBE_PRODUCERS, DESCRIBE_TRANSACTIONS}
ONGOING, PREPARE_COMMIT, PREPARE_ABORT, PREPARE_FENCE = 1, 2, 3, 7

Address = tuple[str, int]


class Decisions:
    """What the coordinator's log says about each producer's transactions."""

    def __init__(self, records: Iterable[Record]) -> None:
        """`records` of every partition of the topic `__transaction_state`, each in order."""
        self._latest: dict[int, int] = {}
        self._decided: dict[tuple[int, Where], bool] = {}
        for record in records:
            if record.value is not None and record.key[:2] == b"\0\0":
                self._note(record.value)

    def _note(self, value: bytes) -> None:
        version, producer, _, _, status = struct.unpack_from(">hqhib", value)
        self._latest[producer] = status
        if status in (PREPARE_COMMIT, PREPARE_ABORT, PREPARE_FENCE):
            wire = FlexibleReader(value[struct.calcsize(">hqhib") :])
            for where in wire.partitions(compact=version > 0):
                self._decided[producer, where] = status == PREPARE_COMMIT

    def of(self, transaction: Open) -> bool | None:
        """Whether the transaction was committed; None when it is still the coordinator's business or was never here."""
        if self._latest.get(transaction.producer) in (None, ONGOING, PREPARE_COMMIT, PREPARE_ABORT, PREPARE_FENCE):
            return None
        return self._decided.get((transaction.producer, transaction.where))


class Mender:
    """Looks after the ends of the transactions on a cluster. Threads may share it."""

    def __init__(
        self,
        cluster: Callable[[], Any],
        open_ends: Callable[[Sequence[Where]], dict[Where, int]],
        states: Callable[[], Iterable[Record]],
        prefix: str,
        login: tuple[str, str] | None = None,
    ) -> None:
        """`cluster` gives the client's metadata; `open_ends` the stable ends of those partitions that hold something
        undecided; `states` the records of `STATES`; `prefix` is how the names of our topics begin; `login`:
        user and password of brokers that ask for them."""
        self._cluster, self._open_ends, self._states, self._prefix = cluster, open_ends, states, prefix
        self._login = login
        self._stuck: dict[Where, int] = {}
        self._lines: dict[Address, BrokerConnection] = {}
        self._leaders: dict[Where, Address] = {}
        self._able: bool | None = None
        self._lock = threading.Lock()

    def can_mend(self) -> bool:
        """Whether the brokers answer what is asked here (Apache Kafka does since 3.0). Asked once."""
        if self._able is None:
            brokers = self._cluster().brokers.values()
            with self._lock:
                missing = set[int]().union(*(NEEDED_REQUESTS - self._line((b.host, b.port)).speaks() for b in brokers))
            if missing:
                log.warning(
                    "the brokers do not answer requests %s: what they forget to end stays open", sorted(missing)
                )
            self._able = not missing
        return self._able

    def mend(self) -> int:
        """End what stood still since the last call; returns on how many partitions."""
        now = self._unsettled_here()
        with self._lock:
            wheres = [where for where, end in now.items() if self._stuck.get(where) == end]
            self._stuck = now
            return len(
                self._apply_decisions(
                    [transaction for transactions in self._ask_leaders(wheres).values() for transaction in transactions]
                )
            )

    def settle_own(self, transactional_id: str) -> None:
        """End what an id left behind that was fenced just now: nothing of it can be open in earnest.

        Raises UnreachableError when that cannot be known or done yet."""
        now = self._unsettled_here()
        if not now:
            return
        producer = self.producer_of(transactional_id)
        with self._lock:
            answers = self._ask_leaders(now)
            leftovers = [
                transaction
                for transactions in answers.values()
                for transaction in transactions
                if transaction.producer == producer
            ]
            open_at = {transaction.where for transaction in set(leftovers) - set(self._apply_decisions(leftovers))}
        unknown = now.keys() - answers.keys()
        if producer is None or unknown or open_at:
            raise UnreachableError(
                f"{transactional_id} may have left transactions open (producer {producer}, not ended on {open_at}, no"
                f" answer for {unknown}). Try again."
            )

    def producer_of(self, transactional_id: str) -> int | None:
        """The producer id behind a transactional id, asked of its coordinator; None while there is none."""
        brokers = self._cluster().brokers.values()
        with self._lock:
            answers = [self._line((broker.host, broker.port)).producer_of(transactional_id) for broker in brokers]
        return next((answer for answer in answers if answer is not None), None)

    def wheres_at_rest(self, producer: int, wheres: Collection[Where]) -> set[Where]:
        """Those of the partitions of which their leaders say that the producer has no transaction open there."""
        with self._lock:
            answers = self._ask_leaders(wheres)
        return {
            where for where, transactions in answers.items() if all(one.producer != producer for one in transactions)
        }

    def offsets_of(self, group: str) -> Where:
        """Where the offsets of a group are kept: Java's hash of its name, as the broker takes it."""
        number = 0
        for (unit,) in struct.iter_unpack(">H", group.encode("utf-16-be")):
            number = (31 * number + unit) & 0xFFFFFFFF
        return OFFSETS, abs(number - (number >> 31 << 32)) % len(self._cluster().topics[OFFSETS].partitions)

    def close(self) -> None:
        """Hang up. Idempotent."""
        with self._lock:
            for line in self._lines.values():
                line.close()

    # -- under the lock

    def _unsettled_here(self) -> dict[Where, int]:
        """Stable ends of what is undecided on all topics that our transactions write to."""
        topics = {name: row for name, row in self._cluster().topics.items() if name.startswith((self._prefix, OFFSETS))}
        return self._open_ends([(name, p) for name, row in topics.items() if row.error is None for p in row.partitions])

    def _ask_leaders(self, wheres: Collection[Where]) -> dict[Where, list[Open]]:
        """The open transactions on those of the partitions whose leaders are known and answer for them."""
        by_leader: dict[Address, list[Where]] = {}
        for where in wheres:
            leader = self._leader(where)
            if leader is not None:
                by_leader.setdefault(leader, []).append(where)
        transactions: dict[Where, list[Open]] = {}
        try:
            for leader, share in by_leader.items():
                transactions |= self._line(leader).open_transactions(share)
        finally:
            if len(transactions) < len(wheres):
                self._leaders.clear()  # they moved, or are about to
        return transactions

    def _apply_decisions(self, transactions: Sequence[Open]) -> list[Open]:
        """Ends those whose decision is known; returns those that are ended now."""
        if not transactions:
            return []
        decisions = Decisions(self._states())
        ends = []
        for transaction in transactions:
            is_commit, leader = decisions.of(transaction), self._leader(transaction.where)
            if is_commit is None or leader is None:
                continue
            # Others mend too, and an owner that waited for this end goes on at once: its next one is not ours to end.
            still = transaction in self._line(leader).open_transactions([transaction.where]).get(transaction.where, ())
            if not still or self._line(leader).end(transaction, is_commit=is_commit):
                ends.append(transaction)
        return ends

    def _leader(self, where: Where) -> Address | None:
        if where not in self._leaders:
            cluster = self._cluster()
            for name, row in cluster.topics.items():
                for number, partition in row.partitions.items():
                    broker = cluster.brokers.get(partition.leader)
                    if broker is not None:
                        self._leaders[name, number] = (broker.host, broker.port)
        return self._leaders.get(where)

    def _line(self, address: Address) -> BrokerConnection:
        if address not in self._lines:
            self._lines[address] = BrokerConnection(*address, self._login)
        return self._lines[address]


class Trail:
    """Where the last transaction of one transactor wrote, until it is ended there."""

    def __init__(self, mender: Mender, transactional_id: str) -> None:
        self._mender, self._id = mender, transactional_id
        self._producer: int | None = None
        self._places: set[Where] = set()
        self._offsets: dict[str, Where] = {}

    def wrote(self, topic: str, partition: int) -> None:
        """A record of the open transaction lies there."""
        self._places.add((topic, partition))

    def add_group(self, group: str) -> None:
        """The open transaction moves offsets of that group."""
        if group not in self._offsets:
            self._offsets[group] = self._mender.offsets_of(group)
        self._places.add(self._offsets[group])

    def open_wheres(self) -> Collection[Where]:
        """Where the last transaction may still be open. Raises UnreachableError."""
        if self._places and self._producer is None:
            self._producer = self._mender.producer_of(self._id)
        if self._places and self._producer is not None:
            self._places -= self._mender.wheres_at_rest(self._producer, self._places)
        return self._places
