"""The requests to a broker that no client library has, in Kafka's own encoding.

Invariants: what a broker does not answer is an error or missing from the answer, never taken for "nothing", save what
it does not let us look at; a marker is sent at most once. Listeners without TLS only, with SASL/PLAIN or no login.
"""

from __future__ import annotations

import io
import logging
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from millrace.infra.errors import UnreachableError

log = logging.getLogger(__name__)

Where = tuple[str, int]

SASL_HANDSHAKE, SASL_AUTHENTICATE = 17, 36
LEAVE_GROUP, API_VERSIONS, WRITE_MARKERS, DESCRIBE_PRODUCERS, DESCRIBE_TRANSACTIONS = 13, 18, 27, 61, 65
ACCESS_DENIAL = 29
"""the broker's code where a topic may not be read"""
WAIT_S = 10.0
CLIENT = b"millrace"


@dataclass(frozen=True, slots=True)
class Open:
    """A producer's unfinished transaction on a partition, as the partition's leader sees it."""

    where: Where
    producer: int
    epoch: int
    coordinator_epoch: int
    start: int


class BrokerConnection:
    """A connection to one broker, opened when it is needed and again after an error. Use it from one thread. `login`:
    user and password of a broker that asks for them."""

    def __init__(self, host: str, port: int, login: tuple[str, str] | None = None) -> None:
        self._address = (host, port)
        self._login = login
        self._socket: socket.socket | None = None

    def speaks(self) -> set[int]:
        """The numbers of the requests that this broker answers."""
        answer = self._exchange(struct.pack(">hhih", API_VERSIONS, 0, 1, len(CLIENT)) + CLIENT)
        _, _, count = answer.take(">ihi")
        return {answer.take(">hhh")[0] for _ in range(count)}

    def open_transactions(self, wheres: Iterable[Where]) -> dict[Where, list[Open]]:
        """The unfinished transactions on those of these partitions that this broker leads; none on those that it does
        not let us look at, which are left to it."""
        topics = _by_topic(wheres)
        body = _array(_text(t) + _array(struct.pack(">i", p) for p in ps) + b"\0" for t, ps in topics.items()) + b"\0"
        answer = self._ask(DESCRIBE_PRODUCERS, 0, body)
        answer.take(">i")
        transactions: dict[Where, list[Open]] = {}
        for _ in range(answer.count()):
            topic = answer.text()
            for _ in range(answer.count()):
                partition, error = answer.take(">ih")
                answer.text()
                rows = []
                for _ in range(answer.count()):
                    producer, epoch, _, _, coordinator, start = answer.take(">qiiqiq")
                    answer.tags()
                    if start >= 0:
                        rows.append(Open((topic, partition), producer, epoch, coordinator, start))
                answer.tags()
                if error in (0, ACCESS_DENIAL):
                    transactions[topic, partition] = rows
            answer.tags()
        return transactions

    def producer_of(self, transactional_id: str) -> int | None:
        """The producer id behind a transactional id; None when this broker is not its coordinator."""
        answer = self._ask(DESCRIBE_TRANSACTIONS, 0, _array([_text(transactional_id)]) + b"\0")
        answer.take(">i")
        for _ in range(answer.count()):
            (error,) = answer.take(">h")
            answer.text(), answer.text()
            _, _, producer, _ = answer.take(">iqqh")
            return int(producer) if error == 0 else None
        return None

    def end(self, transaction: Open, *, is_commit: bool) -> bool:
        """Write the marker of a transaction on one partition; whether the broker, its leader, took it."""
        topic, partition = transaction.where
        where = _text(topic) + _array([struct.pack(">i", partition)]) + b"\0"
        marker = struct.pack(">qhb", transaction.producer, transaction.epoch, is_commit) + _array([where])
        marker += struct.pack(">i", max(0, transaction.coordinator_epoch)) + b"\0"
        self.close()  # on a new connection a request is not repeated: a second marker could end the next transaction
        answer = self._ask(WRITE_MARKERS, 1, _array([marker]) + b"\0")
        errors = []
        for _ in range(answer.count()):
            answer.take(">q")
            for _ in range(answer.count()):
                answer.text()
                for _ in range(answer.count()):
                    errors.append(answer.take(">ih")[1])
                    answer.tags()
                answer.tags()
            answer.tags()
        log.warning("%s ended as decided (committed: %s): errors %s", transaction, is_commit, errors)
        return errors == [0]

    def leave_group(self, group: str, member_id: str) -> bool:
        """Send LeaveGroup in a member's name to its coordinator; whether the member was known."""
        body = b"".join(struct.pack(">h", len(data)) + data for data in (group.encode(), member_id.encode()))
        answer = self._exchange(struct.pack(">hhih", LEAVE_GROUP, 0, 1, len(CLIENT)) + CLIENT + body)
        return bool(answer.take(">ih")[1] == 0)

    def close(self) -> None:
        """Hang up. Idempotent; the next request opens the connection again."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _ask(self, api: int, version: int, body: bytes) -> FlexibleReader:
        answer = self._exchange(struct.pack(">hhih", api, version, 1, len(CLIENT)) + CLIENT + b"\0" + body)
        answer.take(">i")
        answer.tags()
        return answer

    def _exchange(self, request: bytes) -> FlexibleReader:
        data = struct.pack(">i", len(request)) + request
        if self._socket is not None:
            with suppress(OSError):  # a broker hangs up on who is silent for long, which is found out by speaking
                return self._send(self._socket, data)
            self.close()
        try:
            self._socket = socket.create_connection(self._address, WAIT_S)
            self._enter(self._socket)
            return self._send(self._socket, data)
        except OSError as error:
            self.close()
            host, port = self._address
            raise UnreachableError(f"{host}:{port} does not answer: {error}. Try again.") from error

    def _enter(self, line: socket.socket) -> None:
        """Log in where the broker asks for it. Raises ConnectionError when it does not let us in."""
        if self._login is None:
            return
        credentials = b"\0" + b"\0".join(part.encode() for part in self._login)
        for api, version, body in (
            (SASL_HANDSHAKE, 1, struct.pack(">h", 5) + b"PLAIN"),
            (SASL_AUTHENTICATE, 0, struct.pack(">i", len(credentials)) + credentials),
        ):
            request = struct.pack(">hhih", api, version, 1, len(CLIENT)) + CLIENT + body
            _, error = self._send(line, struct.pack(">i", len(request)) + request).take(">ih")
            if error:
                raise ConnectionError(f"the broker does not let us in (code {error})")

    @staticmethod
    def _send(line: socket.socket, data: bytes) -> FlexibleReader:
        line.sendall(data)
        (size,) = struct.unpack(">i", _exactly(line, 4))
        return FlexibleReader(_exactly(line, size))


def _by_topic(wheres: Iterable[Where]) -> dict[str, list[int]]:
    topics: dict[str, list[int]] = {}
    for topic, partition in wheres:
        topics.setdefault(topic, []).append(partition)
    return topics


def _exactly(line: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = line.recv(size - len(data))
        if not part:
            raise ConnectionError("the broker closed the connection")
        data += part
    return data


class FlexibleReader:
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
        wheres = []
        for _ in range(self.count() if compact else max(0, self.take(">i")[0])):
            topic = self.text() if compact else self._in.read(self.take(">h")[0]).decode()
            for _ in range(self.count() if compact else self.take(">i")[0]):
                wheres.append((topic, self.take(">i")[0]))
            if compact:
                self.tags()
        return wheres


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
