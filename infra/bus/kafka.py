"""The bus over Apache Kafka, through librdkafka.

Invariants: topics are never created by accident; readers that come and go share a small pool of clients, while members,
tails, publishers and transactors have their own; nothing here knows a namespace.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import confluent_kafka.admin
from confluent_kafka import Consumer, ConsumerGroupState, IsolationLevel, KafkaError, KafkaException, TopicPartition

from infra.bus import kafka_mend
from infra.bus.base import (
    Bus,
    GroupMember,
    GroupView,
    Member,
    OnAssign,
    OnRevoke,
    Place,
    Publisher,
    Record,
    Tail,
    TopicSpec,
    Transactor,
)
from infra.bus.kafka_common import WAIT_S, common, know_topic, patient, raise_ours, reading, records_of
from infra.bus.kafka_entry import Listener, greet, made
from infra.bus.kafka_mend import Mender, Trail
from infra.bus.kafka_read import KafkaMember, KafkaTail, take
from infra.bus.kafka_wire import Line, Where
from infra.bus.kafka_write import KafkaPublisher, KafkaTransactor
from infra.bus.specs import compare
from infra.errors import BusError, TopicError, UnreachableError

kafka: Any = confluent_kafka.admin  # half of its names are hidden from type checkers

SKIP = 500
"""offsets between two wanted records that are cheaper to read than to seek over"""


class KafkaBus(Bus):
    """A Kafka cluster. Threads may share it, but not the members, tails and transactors that it opens."""

    def __init__(
        self,
        bootstrap: str,
        options: Mapping[str, Any] | None = None,
        *,
        client_id: str = "",
        session_timeout_s: float = 6.0,
        replication: int = -1,
        prefix: str = "",
    ) -> None:
        """`prefix`: how the names of our topics begin; what others left open on a shared cluster is theirs to end.
        `options` are librdkafka settings for every client (SASL, TLS ...). `session_timeout_s` is after how long a
        silent member loses its slots; brokers refuse less than 6 unless told otherwise. `replication` -1 leaves it to
        the broker."""
        self._bootstrap = bootstrap
        self._options = dict(options or {})
        self._session_timeout_s = session_timeout_s
        self._replication = replication
        self._base = common(bootstrap, self._options, client_id)
        self._lock = threading.Lock()
        self._admin: Any = None
        self._heard = Listener(client_id)
        self._greeted = False
        self._idle: list[Consumer] = []
        self._counts: dict[str, int] = {}
        self._mender = Mender(self._cluster, self._unsettled, self._states, prefix)

    # -- topics

    @property
    def admin(self) -> Any:
        """The cluster's administration, once it has answered. Raises ConfigError, AccessError or UnreachableError."""
        self._enter()
        return self._admin

    def _enter(self) -> None:
        """Whoever is not let in learns it here, at once and in words, not from a client that goes on trying."""
        with self._lock:
            if self._admin is None:
                self._admin = made(kafka.AdminClient, {**self._base, "error_cb": self._heard})
        if not self._greeted:
            self._heard.refusal = None
            greet(self._admin, self._heard, self._bootstrap, WAIT_S)
            self._greeted = True

    def topics(self, prefix: str) -> list[str]:
        return sorted(name for name in self._cluster().topics if name.startswith(prefix))

    def partitions(self, topic: str) -> int:
        if topic not in self._counts:
            found = self._describe([topic])
            if topic not in found:
                raise TopicError(f"topic {topic} is missing. Create it with `millrace topics`.")
            self._counts[topic] = found[topic]
        return self._counts[topic]

    def _describe(self, names: Sequence[str]) -> dict[str, int]:
        """Partition counts of those topics that exist and can be written to."""
        try:
            known = self.admin.list_topics(timeout=WAIT_S).topics
        except KafkaException as error:
            raise_ours(error, "listing topics")
        rows = {name: known[name] for name in names if name in known and known[name].error is None}
        return {
            name: len(row.partitions)
            for name, row in rows.items()
            if row.partitions and all(p.leader >= 0 for p in row.partitions.values())
        }

    def ensure_topics(self, specs: Sequence[TopicSpec]) -> None:
        missing = [spec for spec in specs if spec.name not in self._describe([s.name for s in specs])]
        if missing:
            wanted = [kafka.NewTopic(s.name, s.partitions, self._replication, config=dict(s.config)) for s in missing]
            for name, future in self.admin.create_topics(wanted, operation_timeout=WAIT_S).items():
                try:
                    future.result(WAIT_S)
                except KafkaException as error:
                    if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                        raise_ours(error, f"creating {name}")
            deadline = time.monotonic() + WAIT_S
            while len(self._describe([s.name for s in missing])) < len({s.name for s in missing}):
                if time.monotonic() > deadline:
                    raise UnreachableError(f"new topics have no leader after {WAIT_S} s. Check the brokers.")
                time.sleep(0.05)
        self.check_topics(specs)

    def check_topics(self, specs: Sequence[TopicSpec]) -> None:
        counts = self._describe([spec.name for spec in specs])
        resources = [kafka.ConfigResource(kafka.ResourceType.TOPIC, name) for name in counts]
        try:
            answers = self.admin.describe_configs(resources).items() if resources else ()
            settings = {resource.name: future.result(WAIT_S) for resource, future in answers}
        except KafkaException as error:
            raise_ours(error, "reading the settings of topics")
        rows = {name: {key: entry.value for key, entry in found.items()} for name, found in settings.items()}
        compare(specs, {name: TopicSpec(name, counts[name], rows[name]) for name in counts})

    def starts(self, topic: str) -> dict[int, int]:
        return {p: at for (_, p), at in self._offsets(self._all(topic), kafka.OffsetSpec.earliest()).items()}

    def ends(self, topic: str) -> dict[int, int]:
        return {p: at for (_, p), at in self._offsets(self._all(topic), kafka.OffsetSpec.latest()).items()}

    def written(self, topic: str) -> dict[int, int]:
        found = self._offsets(self._all(topic), kafka.OffsetSpec.latest(), IsolationLevel.READ_UNCOMMITTED)
        return {p: at for (_, p), at in found.items()}

    def _all(self, topic: str) -> list[Where]:
        return [(topic, p) for p in range(self.partitions(topic))]

    def _offsets(
        self, wheres: Sequence[Where], spec: Any, level: IsolationLevel = IsolationLevel.READ_COMMITTED
    ) -> dict[Where, int]:
        if not wheres:
            return {}
        asked = {TopicPartition(*where): spec for where in wheres}

        def ask() -> dict[Where, int]:
            answers = self.admin.list_offsets(asked, isolation_level=level, request_timeout=WAIT_S)
            return {(tp.topic, tp.partition): future.result(WAIT_S).offset for tp, future in answers.items()}

        return patient(ask, self.admin, {topic for topic, _ in wheres}, "asking for offsets")

    def _unsettled(self, wheres: Sequence[Where]) -> dict[Where, int]:
        """Stable ends of those partitions that hold something undecided."""
        stable = self._offsets(wheres, kafka.OffsetSpec.latest())
        written = self._offsets(wheres, kafka.OffsetSpec.latest(), IsolationLevel.READ_UNCOMMITTED)
        return {where: end for where, end in stable.items() if end < written[where]}

    def settled(self, topic: str, partition: int) -> bool:
        return not self._unsettled([(topic, partition)])

    def mend(self) -> int:
        """See `kafka_mend`. On plaintext listeners only."""
        return self._mender.mend() if self._mends() else 0

    def _mends(self) -> bool:
        return self._plaintext() and self._mender.able()

    def _states(self) -> Iterator[Record]:
        for partition in range(self.partitions(kafka_mend.STATES)):
            yield from self.read(kafka_mend.STATES, partition)

    def _cluster(self) -> Any:
        try:
            return self.admin.list_topics(timeout=WAIT_S)
        except KafkaException as error:
            raise_ours(error, "listing topics")

    def _plaintext(self) -> bool:
        return str(self._options.get("security.protocol", "PLAINTEXT")).upper() == "PLAINTEXT"

    # -- reading

    @contextmanager
    def _reader(self) -> Iterator[Consumer]:
        with self._lock:
            reader = self._idle.pop() if self._idle else None
        if reader is None:
            config = {**reading(self._base), "enable.partition.eof": True, "fetch.wait.max.ms": 5}
            reader = made(Consumer, config)
        try:
            yield reader
        except KafkaException as error:
            raise_ours(error, "reading")
        finally:
            reader.unassign()
            with self._lock:
                self._idle.append(reader)

    def read(self, topic: str, partition: int, start: int = 0, end: int | None = None) -> Iterator[Record]:
        stable = self.ends(topic)[partition]
        stop = stable if end is None else min(end, stable)
        first = max(start, self.starts(topic)[partition])
        return self._read(topic, partition, first, stop) if first < stop else iter(())

    def _read(self, topic: str, partition: int, first: int, stop: int) -> Iterator[Record]:
        with self._reader() as reader:
            know_topic(reader, topic)
            reader.assign([TopicPartition(topic, partition, first)])
            for messages in _answers(reader, 1000):
                for record in records_of(messages, f"reading {topic}[{partition}]"):
                    if record.offset >= stop:
                        return
                    yield record
                    if record.offset + 1 >= stop:
                        return
                if any(_at_end(message) for message in messages):
                    return

    def fetch(self, places: Sequence[Place]) -> list[Record | None]:
        wanted: dict[Where, list[int]] = {}
        for topic, partition, offset in sorted(set(places)):
            wanted.setdefault((topic, partition), []).append(offset)
        starts = self._offsets(list(wanted), kafka.OffsetSpec.earliest())
        ends = self._offsets(list(wanted), kafka.OffsetSpec.latest())
        found: dict[Place, Record] = {}
        for where, offsets in wanted.items():
            kept = [offset for offset in offsets if starts[where] <= offset < ends[where]]
            for run in _runs(kept):
                for record in self._read(*where, run[0], run[-1] + 1):
                    found[record.place] = record
        return [found.get(Place(*place)) for place in places]

    def tail(self, positions: Mapping[Where, int]) -> Tail:
        self._enter()
        return KafkaTail(self._base, positions)

    def member(
        self,
        group: str,
        topic: str,
        *,
        client_id: str = "",
        on_assign: OnAssign | None = None,
        on_revoke: OnRevoke | None = None,
        assignor: str = "cooperative-sticky",
        session_timeout_s: float | None = None,
        max_poll_interval_s: float = 300.0,
    ) -> Member:
        self.partitions(topic)
        base = {**self._base, "client.id": client_id} if client_id else self._base
        session = session_timeout_s or self._session_timeout_s
        return KafkaMember(base, group, topic, on_assign, on_revoke, assignor, session, max_poll_interval_s)

    # -- writing

    def publisher(self, *, gapless: bool = False) -> Publisher:
        self._enter()
        return KafkaPublisher(self._base, gapless=gapless)

    def transactor(self, transactional_id: str) -> Transactor:
        self._enter()
        trail = Trail(self._mender, transactional_id) if self._mends() else None
        transactor = KafkaTransactor(self._base, transactional_id, trail)
        try:
            if trail is not None:
                self._mender.settle_own(transactional_id)
        except BusError:
            transactor.close()
            raise
        return transactor

    # -- groups

    def group(self, group: str) -> GroupView:
        def ask() -> Any:
            try:
                return self.admin.describe_consumer_groups([group], request_timeout=WAIT_S)[group].result(WAIT_S)
            except KafkaException as error:
                if error.args[0].code() != KafkaError.GROUP_ID_NOT_FOUND:
                    raise
                return None

        found = patient(ask, self.admin, (), f"describing group {group}")
        if found is None:
            return GroupView(True, ())
        rows = tuple(
            GroupMember(
                m.member_id,
                m.client_id,
                m.host,
                frozenset((tp.topic, tp.partition) for tp in m.assignment.topic_partitions),
            )
            for m in found.members
        )
        calm = (ConsumerGroupState.STABLE, ConsumerGroupState.EMPTY, ConsumerGroupState.DEAD)
        return GroupView(found.state in calm, rows)

    def expel(self, group: str, member_id: str) -> bool:
        """Sends LeaveGroup in the member's name: the client library has no call for it. Plaintext listeners only;
        with TLS or SASL the session timeout does it, and this returns False."""
        if not self._plaintext():
            return False
        try:
            found = self.admin.describe_consumer_groups([group], request_timeout=WAIT_S)[group].result(WAIT_S)
        except KafkaException as error:
            raise_ours(error, f"describing group {group}")
        line = Line(found.coordinator.host, found.coordinator.port)
        try:
            return line.leave_group(group, member_id)
        finally:
            line.close()

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for reader in idle:
            reader.close()
        self._mender.close()


def _at_end(message: Any) -> bool:
    return message.error() is not None and message.error().code() == KafkaError._PARTITION_EOF


def _answers(reader: Consumer, size: int) -> Iterator[list[Any]]:
    """What an assigned reader returns, as long as it returns something."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        messages = take(reader, size, 1.0)
        if messages:
            deadline = time.monotonic() + WAIT_S
            yield messages
    raise UnreachableError(f"no answer in {WAIT_S} s while reading. Check that the broker is up (`millrace doctor`).")


def _runs(offsets: Sequence[int]) -> list[list[int]]:
    """Offsets in ascending order, cut where seeking is cheaper than reading on."""
    runs: list[list[int]] = []
    for offset in offsets:
        if runs and offset - runs[-1][-1] <= SKIP:
            runs[-1].append(offset)
        else:
            runs.append([offset])
    return runs
