"""Transactions that a broker decided and then forgot to end, ended as they were decided.

A lone broker that is killed between deciding a transaction and writing its markers loads that decision on its next
start while it still believes it leads its partitions, then finds them leaderless for a moment, takes them for deleted
and marks the transaction as complete without its markers (Apache Kafka 4.4: "these partitions are likely deleted
already and hence can be skipped"; 6 of 14 kills right after a commit). Readers then wait in front of records that were
committed, for ever if their writer never writes there again.

Invariants: only a transaction is touched whose coordinator is done with it, on a partition that stood still between two
calls or whose writer has just fenced itself; and only with the decision that the coordinator's own log holds for that
partition. A new owner mends what its own id left before it writes, else its first commit would end that too, aborted
records included. The wire format is spoken here because no client library has these calls; brokers behind TLS or SASL
are left to their operators.
"""

from __future__ import annotations

import io
import logging
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from infra.bus.base import Record
from infra.errors import UnreachableError

log = logging.getLogger(__name__)

Where = tuple[str, int]

STATES = "__transaction_state"
DESCRIBE_PRODUCERS, DESCRIBE_TRANSACTIONS, WRITE_MARKERS = 61, 65, 27
ONGOING, PREPARE_COMMIT, PREPARE_ABORT, PREPARE_FENCE = 1, 2, 3, 7


@dataclass(frozen=True, slots=True)
class Open:
    """A producer's unfinished transaction on a partition, as the partition's leader sees it."""

    where: Where
    producer: int
    epoch: int
    coordinator_epoch: int
    start: int


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
            wire = _Wire(value[struct.calcsize(">hqhib") :])
            for where in wire.partitions(compact=version > 0):
                self._decided[producer, where] = status == PREPARE_COMMIT

    def of(self, found: Open) -> bool | None:
        """Whether the transaction was committed; None when it is still the coordinator's business or was never here."""
        if self._latest.get(found.producer) in (None, ONGOING, PREPARE_COMMIT, PREPARE_ABORT, PREPARE_FENCE):
            return None
        return self._decided.get((found.producer, found.where))


def open_transactions(host: str, port: int, wheres: Iterable[Where]) -> list[Open]:
    """The unfinished transactions on these partitions, asked of their leader."""
    topics = _by_topic(wheres)
    body = _array(_text(t) + _array(struct.pack(">i", p) for p in ps) + b"\0" for t, ps in topics.items()) + b"\0"
    wire = _call(host, port, DESCRIBE_PRODUCERS, 0, body)
    wire.take(">i")
    found = []
    for _ in range(wire.count()):
        topic = wire.text()
        for _ in range(wire.count()):
            partition, _ = wire.take(">ih")
            wire.text()
            for _ in range(wire.count()):
                producer, epoch, _, _, coordinator, start = wire.take(">qiiqiq")
                wire.tags()
                if start >= 0:
                    found.append(Open((topic, partition), producer, epoch, coordinator, start))
            wire.tags()
        wire.tags()
    return found


def producer_of(host: str, port: int, transactional_id: str) -> int | None:
    """The producer id behind a transactional id, asked of its coordinator; None when this broker is not it."""
    wire = _call(host, port, DESCRIBE_TRANSACTIONS, 0, _array([_text(transactional_id)]) + b"\0")
    wire.take(">i")
    for _ in range(wire.count()):
        (error,) = wire.take(">h")
        wire.text(), wire.text()
        _, _, producer, _ = wire.take(">iqqh")
        return int(producer) if error == 0 else None
    return None


def end(host: str, port: int, found: Open, *, committed: bool) -> bool:
    """Write the marker of a transaction on one partition; whether the leader took it."""
    topic, partition = found.where
    where = _text(topic) + _array([struct.pack(">i", partition)]) + b"\0"
    marker = struct.pack(">qhb", found.producer, found.epoch, committed) + _array([where])
    marker += struct.pack(">i", max(0, found.coordinator_epoch)) + b"\0"
    wire = _call(host, port, WRITE_MARKERS, 1, _array([marker]) + b"\0")
    errors = []
    for _ in range(wire.count()):
        wire.take(">q")
        for _ in range(wire.count()):
            wire.text()
            for _ in range(wire.count()):
                errors.append(wire.take(">ih")[1])
                wire.tags()
            wire.tags()
        wire.tags()
    log.warning("%s of %s ended as decided (committed: %s): errors %s", found, found.where, committed, errors)
    return errors == [0]


def _by_topic(wheres: Iterable[Where]) -> dict[str, list[int]]:
    topics: dict[str, list[int]] = {}
    for topic, partition in wheres:
        topics.setdefault(topic, []).append(partition)
    return topics


def _call(host: str, port: int, api: int, version: int, body: bytes) -> _Wire:
    request = struct.pack(">hhih", api, version, 1, 8) + b"millrace" + b"\0" + body
    try:
        with socket.create_connection((host, port), 10) as wire:
            wire.sendall(struct.pack(">i", len(request)) + request)
            file = wire.makefile("rb")
            (size,) = struct.unpack(">i", _exactly(file, 4))
            answer = _Wire(_exactly(file, size))
    except OSError as error:
        raise UnreachableError(f"{host}:{port} does not answer: {error}. Try again.") from error
    answer.take(">i")
    answer.tags()
    return answer


def _exactly(file: Any, size: int) -> bytes:
    data: bytes = file.read(size)
    if len(data) != size:
        raise ConnectionError("the broker closed the connection")
    return data


class _Wire:
    """Reads Kafka's flexible encoding."""

    def __init__(self, data: bytes) -> None:
        self._in = io.BytesIO(data)

    def take(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(form, self._in.read(struct.calcsize(form)))

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._in.read(1)[0]
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def count(self) -> int:
        """Elements of a compact array; none for null."""
        return max(0, self.varint() - 1)

    def text(self) -> str:
        """A compact string; empty for null."""
        return self._in.read(max(0, self.varint() - 1)).decode()

    def tags(self) -> None:
        for _ in range(self.varint()):
            self.varint()
            self._in.read(self.varint())

    def partitions(self, *, compact: bool) -> list[Where]:
        """The partitions in a record of the coordinator's log."""
        found = []
        for _ in range(self.count() if compact else max(0, self.take(">i")[0])):
            topic = self.text() if compact else self._in.read(self.take(">h")[0]).decode()
            for _ in range(self.count() if compact else self.take(">i")[0]):
                found.append((topic, self.take(">i")[0]))
            if compact:
                self.tags()
        return found


def _varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def _text(value: str) -> bytes:
    data = value.encode()
    return _varint(len(data) + 1) + data


def _array(items: Iterable[bytes]) -> bytes:
    parts = list(items)
    return _varint(len(parts) + 1) + b"".join(parts)
