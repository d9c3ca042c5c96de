"""The bus over Apache Kafka, through librdkafka.

Invariants: topics are never created by accident; readers that come and go share a small pool of clients, while members,
tails, publishers and transactors have their own; nothing here knows a namespace.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Unpack

import confluent_kafka.admin
from confluent_kafka import (
    OFFSET_INVALID,
    Consumer,
    ConsumerGroupState,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)

from millrace.infra.errors import BusError, MillraceError, TopicError, UnreachableError
from millrace.infra.log.base import (
    Bus,
    GroupMember,
    GroupView,
    Member,
    MemberTerms,
    Place,
    Publisher,
    Record,
    Tail,
    TopicSpec,
    Transactor,
)
from millrace.infra.log.kafka import mend
from millrace.infra.log.kafka.common import (
    WAIT_S,
    bus_error,
    common,
    is_fenced,
    know_topic,
    patient,
    raise_ours,
    reading,
    records_of,
)
from millrace.infra.log.kafka.entry import ErrorListener, contact, create, greet
from millrace.infra.log.kafka.liveness import ClientWatcher
from millrace.infra.log.kafka.mend import Mender, Trail
from millrace.infra.log.kafka.read import KafkaMember, KafkaTail, take
from millrace.infra.log.kafka.wire import BrokerConnection, Where
from millrace.infra.log.kafka.write import KafkaPublisher, KafkaTransactor
from millrace.infra.log.specs import alterations, compare

kafka: Any = confluent_kafka.admin  # half of its names are hidden from type checkers

ANSWER_S = 5.0
"""within which brokers that answer at all answer a new client"""
SKIP = 500
"""offsets between two wanted records that are cheaper to read than to seek over"""


class KafkaBus(Bus):
    """A Kafka cluster. Threads may share it, but not the members, tails and transactors that it opens."""

    def __init__(
        self,
        bootstrap: str,
        options: Mapping[str, object] | None = None,
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
        self._heard = ErrorListener(client_id)
        self._greeted = False
        self._idle: list[Consumer] = []
        self._counts: dict[str, int] = {}
        self._watcher = ClientWatcher(self._answers_others)
        self._mender = Mender(self._cluster, self._open_ends, self._states, prefix, self._login())

    # -- topics

    @property
    def admin(self) -> Any:
        """The cluster's administration, once it has answered. Raises ConfigError, AccessError or UnreachableError."""
        return self._enter()

    def _enter(self) -> Any:
        """Whoever is not let in learns it here, at once and in words, not from a client that goes on trying."""
        with self._lock:
            if self._admin is None:
                self._admin = create(kafka.AdminClient, {**self._base, "error_cb": self._heard})
            admin, is_greeted = self._admin, self._greeted
        if not is_greeted:
            self._heard.refusal = None
            with self._asking():
                greet(admin, self._heard, self._bootstrap, WAIT_S)
            self._greeted = True
        return admin

    @contextmanager
    def _asking(self, act: str = "asking") -> Iterator[None]:
        """A question to the administration. A client that got no answer may be silent for good: it is dropped."""
        try:
            yield
        except KafkaException as error:
            fault = bus_error(error.args[0], act)
            self._forget_admin(fault)
            raise fault from error
        except BusError as error:
            self._forget_admin(error)
            raise
        except TimeoutError as error:
            fault = UnreachableError(f"{act}: no answer in {WAIT_S:g} s. Check that the broker is up.")
            self._forget_admin(fault)
            raise fault from error

    def _forget_admin(self, error: BusError) -> None:
        if isinstance(error, UnreachableError):
            with self._lock:
                self._admin, self._greeted = None, False

    def _answers_others(self) -> bool:
        """Whether the brokers answer a client that is made now."""
        try:
            contact(self._bootstrap, self._options, ANSWER_S)
        except MillraceError:
            return False
        return True

    def topics(self, prefix: str) -> list[str]:
        return sorted(name for name in self._cluster().topics if name.startswith(prefix))

    def partitions(self, topic: str) -> int:
        if topic not in self._counts:
            counts = self._describe([topic])
            if topic not in counts:
                raise TopicError(f"topic {topic} is missing. Create it with `millrace topics`.")
            self._counts[topic] = counts[topic]
        return self._counts[topic]

    def _describe(self, names: Sequence[str]) -> dict[str, int]:
        """Partition counts of those topics that exist, once each has its leaders: brokers that were just started or
        thawed know a topic before they lead it. Raises UnreachableError where leaders stay away."""
        deadline = time.monotonic() + WAIT_S
        while True:
            topics = self._cluster().topics
            rows = [topics[name] for name in names if name in topics and _exists(topics[name].error)]
            if all(row.partitions and all(p.leader >= 0 for p in row.partitions.values()) for row in rows):
                return {row.topic: len(row.partitions) for row in rows}
            if time.monotonic() > deadline:
                raise UnreachableError(f"topics have no leader after {WAIT_S} s. Check the brokers.")
            time.sleep(0.05)

    def ensure_topics(self, specs: Sequence[TopicSpec]) -> None:
        missing = [spec for spec in specs if spec.name not in self._describe([s.name for s in specs])]
        if missing:
            self._create(missing)
            deadline = time.monotonic() + WAIT_S
            while len(self._describe([s.name for s in missing])) < len({s.name for s in missing}):
                if time.monotonic() > deadline:
                    raise UnreachableError(f"new topics are not known after {WAIT_S} s. Check the brokers.")
                time.sleep(0.05)
        self._alter(alterations(specs, self._existing_specs(specs)))
        self.check_topics(specs)

    def _create(self, specs: Sequence[TopicSpec]) -> None:
        """Create topics; another may have made them meanwhile. Brokers that were just started or thawed take none until
        their controller counts them in again: that is waited for. Raises UnreachableError where it lasts."""
        deadline = time.monotonic() + WAIT_S
        waiting = {
            s.name: kafka.NewTopic(s.name, s.partitions, self._replication, config=dict(s.config)) for s in specs
        }
        while waiting:
            for name, future in self.admin.create_topics([*waiting.values()], operation_timeout=WAIT_S).items():
                with self._asking(f"creating {name}"):
                    try:
                        future.result(WAIT_S)
                    except KafkaException as error:
                        if is_fenced(error.args[0]):
                            continue
                        if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                            raise
                del waiting[name]
            if waiting and time.monotonic() > deadline:
                raise UnreachableError(
                    f"creating {next(iter(waiting))}: the brokers are up and their controller counts none of them in "
                    f"(fenced) after {WAIT_S:g} s, as while they start or were frozen. Check their logs."
                )
            if waiting:
                time.sleep(0.05)

    def _alter(self, changes: Mapping[str, Mapping[str, str]]) -> None:
        resources = [
            kafka.ConfigResource(
                kafka.ResourceType.TOPIC,
                name,
                incremental_configs=[
                    kafka.ConfigEntry(key, value, incremental_operation=kafka.AlterConfigOpType.SET)
                    for key, value in settings.items()
                ],
            )
            for name, settings in changes.items()
        ]
        try:
            for future in self.admin.incremental_alter_configs(resources).values() if resources else ():
                future.result(WAIT_S)
        except KafkaException as error:
            raise_ours(error, f"changing the settings of {', '.join(changes)}")

    def check_topics(self, specs: Sequence[TopicSpec]) -> None:
        compare(specs, self._existing_specs(specs))

    def _existing_specs(self, specs: Sequence[TopicSpec]) -> dict[str, TopicSpec]:
        """Those of the topics that exist, with their whole configurations."""
        counts = self._describe([spec.name for spec in specs])
        resources = [kafka.ConfigResource(kafka.ResourceType.TOPIC, name) for name in counts]
        with self._asking("reading the settings of topics"):
            answers = self.admin.describe_configs(resources).items() if resources else ()
            settings = {resource.name: future.result(WAIT_S) for resource, future in answers}
        rows = {name: {key: entry.value for key, entry in entries.items()} for name, entries in settings.items()}
        return {name: TopicSpec(name, counts[name], rows[name]) for name in counts}

    def starts(self, topic: str) -> dict[int, int]:
        return {p: at for (_, p), at in self._offsets(self._wheres(topic), kafka.OffsetSpec.earliest()).items()}

    def ends(self, topic: str) -> dict[int, int]:
        return {p: at for (_, p), at in self._offsets(self._wheres(topic), kafka.OffsetSpec.latest()).items()}

    def since(self, topic: str, moment: int) -> dict[int, int]:
        ends = self.log_ends(topic)
        spec = kafka.OffsetSpec.for_timestamp(max(0, -(-moment // 1000)))  # Kafka's clock counts milliseconds
        offsets = self._offsets(self._wheres(topic), spec)
        return {p: at if at >= 0 else ends[p] for (_, p), at in offsets.items()}

    def log_ends(self, topic: str) -> dict[int, int]:
        offsets = self._offsets(self._wheres(topic), kafka.OffsetSpec.latest(), IsolationLevel.READ_UNCOMMITTED)
        return {p: at for (_, p), at in offsets.items()}

    def _wheres(self, topic: str) -> list[Where]:
        return [(topic, p) for p in range(self.partitions(topic))]

    def _offsets(
        self, wheres: Sequence[Where], spec: Any, level: IsolationLevel = IsolationLevel.READ_COMMITTED
    ) -> dict[Where, int]:
        if not wheres:
            return {}
        requests = {TopicPartition(*where): spec for where in wheres}

        admin = self.admin

        def ask() -> dict[Where, int]:
            answers = admin.list_offsets(requests, isolation_level=level, request_timeout=WAIT_S)
            offsets = {(tp.topic, tp.partition): future.result(WAIT_S).offset for tp, future in answers.items()}
            if OFFSET_INVALID in offsets.values():  # so the library ends a wait in vain, without an error
                raise TimeoutError
            return offsets

        with self._asking():
            return patient(ask, admin, {topic for topic, _ in wheres}, "asking for offsets")

    def _open_ends(self, wheres: Sequence[Where]) -> dict[Where, int]:
        """Stable ends of those partitions that hold something undecided."""
        stable = self._offsets(wheres, kafka.OffsetSpec.latest())
        log_ends = self._offsets(wheres, kafka.OffsetSpec.latest(), IsolationLevel.READ_UNCOMMITTED)
        return {where: end for where, end in stable.items() if end < log_ends[where]}

    def is_settled(self, topic: str, partition: int) -> bool:
        return not self._open_ends([(topic, partition)])

    def mend(self) -> int:
        """See `mend`. On listeners that `kafka_wire` can speak with only."""
        return self._mender.mend() if self._mends() else 0

    def _mends(self) -> bool:
        return self._speakable() and self._mender.can_mend()

    def _states(self) -> Iterator[Record]:
        for partition in range(self.partitions(mend.STATES)):
            yield from self.read(mend.STATES, partition)

    def _cluster(self) -> Any:
        with self._asking("listing topics"):
            return self.admin.list_topics(timeout=WAIT_S)

    def _option(self, *names: str) -> str:
        return next((str(self._options[name]) for name in names if name in self._options), "")

    def _speakable(self) -> bool:
        """Whether `kafka_wire` can speak with the brokers: without TLS, and with a plain login or none."""
        match (self._option("security.protocol") or "PLAINTEXT").upper():
            case "PLAINTEXT":
                return True
            case "SASL_PLAINTEXT":
                return self._option("sasl.mechanism", "sasl.mechanisms").upper() == "PLAIN"
        return False

    def _login(self) -> tuple[str, str] | None:
        if self._option("security.protocol").upper() != "SASL_PLAINTEXT":
            return None
        return self._option("sasl.username"), self._option("sasl.password")

    # -- reading

    @contextmanager
    def _reader(self) -> Iterator[Consumer]:
        with self._lock:
            reader = self._idle.pop() if self._idle else None
        if reader is None:
            config = {**reading(self._base), "enable.partition.eof": True, "fetch.wait.max.ms": 5}
            reader = create(Consumer, config)
        try:
            yield reader
        except KafkaException as error:
            raise_ours(error, "reading")
        except UnreachableError:
            reader = None  # it may be silent for good: the next one is made anew
            raise
        finally:
            if reader is not None:
                reader.unassign()
                with self._lock:
                    self._idle.append(reader)

    def read(self, topic: str, partition: int, start: int = 0, end: int | None = None) -> Iterator[Record]:
        stable = self.ends(topic)[partition]
        stop = stable if end is None else min(end, stable)
        first = max(start, self.starts(topic)[partition])
        return self._read(topic, partition, first, stop) if first < stop else iter(())

    def _read(
        self, topic: str, partition: int, first: int, stop: int, only: Container[int] | None = None
    ) -> Iterator[Record]:
        """The records from `first` on and before `stop`; of those the offsets in `only`, where it is given."""
        with self._reader() as reader:
            know_topic(reader, topic)
            reader.assign([TopicPartition(topic, partition, first)])
            for messages in _answers(reader, 1000):
                # Making a record costs more than receiving it.
                selection = messages if only is None else [m for m in messages if m.error() or m.offset() in only]
                for record in records_of(selection, f"reading {topic}[{partition}]"):
                    if record.offset >= stop:
                        return
                    yield record
                    if record.offset + 1 >= stop:
                        return
                if any(_at_end(message) or (message.offset() or 0) >= stop for message in messages):
                    return

    def fetch(self, places: Sequence[Place]) -> list[Record | None]:
        requests: dict[Where, list[int]] = {}
        for topic, partition, offset in sorted(set(places)):
            requests.setdefault((topic, partition), []).append(offset)
        starts = self._offsets(list(requests), kafka.OffsetSpec.earliest())
        ends = self._offsets(list(requests), kafka.OffsetSpec.latest())
        records: dict[Place, Record] = {}
        for where, offsets in requests.items():
            in_range = [offset for offset in offsets if starts[where] <= offset < ends[where]]
            for run in _runs(in_range):
                for record in self._read(*where, run[0], run[-1] + 1, set(run)):
                    records[record.place] = record
        return [records.get(Place(*place)) for place in places]

    def tail(self, positions: Mapping[Where, int]) -> Tail:
        self._enter()
        return KafkaTail(self._base, self._watcher, positions)

    def member(self, group: str, topic: str, **terms: Unpack[MemberTerms]) -> Member:
        self.partitions(topic)
        base = {**self._base, "client.id": terms["client_id"]} if terms.get("client_id") else self._base
        session = terms.get("session_timeout_s") or self._session_timeout_s
        return KafkaMember(base, self._watcher, group, topic, session, terms)

    # -- writing

    def publisher(self, *, gapless: bool = False) -> Publisher:
        self._enter()
        return KafkaPublisher(self._base, self._watcher, gapless=gapless)

    def transactor(self, transactional_id: str) -> Transactor:
        self._enter()
        trail = Trail(self._mender, transactional_id) if self._mends() else None
        transactor = KafkaTransactor(self._base, self._watcher, transactional_id, trail)
        try:
            if trail is not None:
                self._mender.settle_own(transactional_id)
        except BusError:
            transactor.close()
            raise
        return transactor

    # -- groups

    def group(self, group: str) -> GroupView:
        admin = self.admin

        def ask() -> Any:
            try:
                return admin.describe_consumer_groups([group], request_timeout=WAIT_S)[group].result(WAIT_S)
            except KafkaException as error:
                if error.args[0].code() != KafkaError.GROUP_ID_NOT_FOUND:
                    raise
                return None

        with self._asking():
            description = patient(ask, admin, (), f"describing group {group}")
        if description is None:
            return GroupView(True, ())
        rows = tuple(
            GroupMember(
                m.member_id,
                m.client_id,
                m.host,
                frozenset((tp.topic, tp.partition) for tp in m.assignment.topic_partitions),
            )
            for m in description.members
        )
        calm = (ConsumerGroupState.STABLE, ConsumerGroupState.EMPTY, ConsumerGroupState.DEAD)
        return GroupView(description.state in calm, rows)

    def expel(self, group: str, member_id: str) -> bool:
        """Sends LeaveGroup in the member's name: the client library has no call for it. Where `kafka_wire`
        cannot speak with the brokers the session timeout does it, and this returns False."""
        if not self._speakable():
            return False
        with self._asking(f"describing group {group}"):
            description = self.admin.describe_consumer_groups([group], request_timeout=WAIT_S)[group].result(WAIT_S)
        line = BrokerConnection(description.coordinator.host, description.coordinator.port, self._login())
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
        self._watcher.close()


def _exists(error: KafkaError | None) -> bool:
    return error is None or error.code() == KafkaError.LEADER_NOT_AVAILABLE


def _at_end(message: Message) -> bool:
    return (error := message.error()) is not None and error.code() == KafkaError._PARTITION_EOF


def _answers(reader: Consumer, size: int) -> Iterator[list[Message]]:
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
