"""Reading from Kafka: the member of a group (classic protocol) and the tail without ownership.

Invariants: a member token is what the client knew when `poll` returned; a record is returned only for a partition that
is owned when `poll` returns; positions that are gone are errors, never jumps.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from millrace.infra.errors import BusError, RefusedError, UnreachableError
from millrace.infra.log.base import EARLIEST, LATEST, Member, MemberTerms, MemberToken, Record, Tail
from millrace.infra.log.kafka.common import WAIT_S, know_topic, offset_for, patient, raise_ours, reading, records_of
from millrace.infra.log.kafka.entry import create
from millrace.infra.log.kafka.liveness import REPORT_MS, ClientWatcher, Pulse

_METADATA = b"CGMDv2:"


def parse_metadata(group: str, raw: bytes) -> MemberToken | None:
    """The token in a consumer's group metadata, which confluent-kafka hands out as librdkafka's bytes.

    None for a consumer that has not joined: such metadata would commit without any fence."""
    if not raw.startswith(_METADATA):
        raise BusError(f"unknown group metadata {raw[:16]!r}: use the confluent-kafka version of the lock file")
    (generation,) = struct.unpack_from("<i", raw, len(_METADATA))
    fields = raw[len(_METADATA) + 4 :].split(b"\0")
    member_id = fields[1].decode()
    if generation < 0 or not member_id:
        return None
    return MemberToken(group, generation, member_id, raw)


def take(consumer: Consumer, max_records: int, timeout_s: float) -> list[Message]:
    """Messages as soon as there is one: `consume` alone would wait for all of `max_records`."""
    first = consumer.consume(1, timeout_s)
    return first + consumer.consume(max_records - 1, 0) if first and max_records > 1 else first


def listening(base: Mapping[str, object], pulse: Pulse) -> dict[str, object]:
    """Configuration of a reader whose life is looked after."""
    return {**reading(base), "statistics.interval.ms": REPORT_MS, "stats_cb": pulse.note_report}


class KafkaMember(Member):
    """One consumer in a group. One that fell silent is replaced by another, which joins as a new member."""

    def __init__(
        self,
        base: Mapping[str, object],
        watcher: ClientWatcher,
        group: str,
        topic: str,
        session_timeout_s: float,
        terms: MemberTerms,
    ) -> None:
        self._group, self._topic = group, topic
        self._on_assign, self._on_revoke = terms.get("on_assign"), terms.get("on_revoke")
        assignor = terms.get("assignor", "cooperative-sticky")
        longest_s = max(terms.get("max_poll_interval_s", 300.0), session_timeout_s)
        self._owned: set[int] = set()
        self._paused: set[int] = set()
        self._sought: dict[int, int] = {}  # where a paused partition goes on once it is resumed
        self._token: MemberToken | None = None
        self._cooperative = assignor.startswith("cooperative")
        self._closed = False
        self._watcher = watcher
        self._config = {
            "partition.assignment.strategy": assignor,
            "session.timeout.ms": int(session_timeout_s * 1000),
            "heartbeat.interval.ms": max(100, int(session_timeout_s * 1000 / 20)),  # how soon a rebalance is heard of
            "max.poll.interval.ms": int(longest_s * 1000),
            **base,
            "group.id": group,
        }
        self._join()

    def _join(self) -> None:
        self._pulse = Pulse(f"the member of {self._group}")
        self._consumer = create(Consumer, listening(self._config, self._pulse))
        self._consumer.subscribe([self._topic], on_assign=self._assign, on_revoke=self._revoke, on_lost=self._revoke)
        self._watcher.watch(self._pulse)

    def _join_anew(self) -> None:
        """Leave a silent client behind. It is dropped, not closed: nobody hears its farewell."""
        self._watcher.forget(self._pulse)
        partitions, self._owned = self._owned, set()
        self._forget(partitions)
        if self._on_revoke and partitions:
            self._on_revoke(partitions)
        self._join()

    def _assign(self, consumer: Consumer, gains: list[TopicPartition]) -> None:
        if consumer is not self._consumer:
            return
        partitions = {tp.partition for tp in gains}
        starts = dict((self._on_assign(set(partitions)) if self._on_assign else None) or {})
        unknown = partitions - starts.keys()
        if unknown:
            starts |= dict.fromkeys(unknown, EARLIEST) | self.committed_offsets(unknown)
        positions = [TopicPartition(self._topic, p, offset_for(starts[p])) for p in sorted(partitions)]
        if self._cooperative:
            consumer.incremental_assign(positions)
        else:
            consumer.assign(positions)
        self._owned |= partitions

    def _revoke(self, consumer: Consumer, losses: list[TopicPartition]) -> None:
        if consumer is not self._consumer:
            return
        partitions = {tp.partition for tp in losses}
        self._owned -= partitions
        self._forget(partitions)
        if self._on_revoke and partitions:
            self._on_revoke(partitions)

    def _forget(self, partitions: set[int]) -> None:
        """A partition that is lost is neither paused nor sought when it comes back."""
        self._paused -= partitions
        for partition in partitions:
            self._sought.pop(partition, None)

    def poll(self, max_records: int, timeout_s: float) -> list[Record]:
        if self._pulse.lost:
            self._join_anew()
        self._pulse.note_wait()
        try:
            messages = take(self._consumer, max_records, timeout_s)
            if self._owned:
                raw = self._consumer.consumer_group_metadata()
                # A member that was expelled and does not know it yet keeps its former token, which is refused.
                if self._token is None or raw != self._token.raw:
                    self._token = parse_metadata(self._group, raw) or self._token
        except KafkaException as error:
            raise_ours(error, f"polling {self._topic} for {self._group}")
        return [r for r in records_of(messages, f"polling {self._topic}") if r.partition in self._owned]

    def assignment(self) -> set[int]:
        return set(self._owned)

    def token(self) -> MemberToken:
        if self._token is None:
            raise RefusedError(f"not a member of {self._group} yet: poll until partitions are assigned")
        return self._token

    def committed_offsets(self, partitions: set[int]) -> dict[int, int]:
        places = [TopicPartition(self._topic, p) for p in sorted(partitions)]
        try:
            offsets = self._consumer.committed(places, timeout=10)
        except KafkaException as error:
            raise_ours(error, f"offsets of {self._group}")
        return {tp.partition: tp.offset for tp in offsets if tp.offset >= 0}

    def seek(self, partition: int, offset: int) -> None:
        if partition not in self._owned:
            return
        if partition in self._paused:
            # librdkafka resumes where it had been, not where a paused partition was sought to meanwhile, when the
            # lookup of the partition's first position was still on its way.
            self._sought[partition] = offset
            return
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                self._consumer.seek(TopicPartition(self._topic, partition, offset_for(offset)))
                return
            except KafkaException as error:
                # A partition that was assigned a moment ago cannot be sought before its fetcher has started.
                if error.args[0].code() != KafkaError._STATE or time.monotonic() > deadline:
                    raise_ours(error, f"seeking {self._topic}[{partition}] to {offset}")
                time.sleep(0.005)

    def pause(self, partitions: set[int]) -> None:
        self._paused |= partitions & self._owned
        self._consumer.pause([TopicPartition(self._topic, p) for p in partitions & self._owned])

    def resume(self, partitions: set[int]) -> None:
        targets = partitions & self._owned
        self._paused -= targets
        self._consumer.resume([TopicPartition(self._topic, p) for p in targets])
        for partition in sorted(targets & self._sought.keys()):
            self.seek(partition, self._sought.pop(partition))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._watcher.forget(self._pulse)
            self._consumer.close()


class KafkaTail(Tail):
    """A consumer that is assigned what it follows. One that fell silent is replaced by another at its positions."""

    def __init__(
        self, base: Mapping[str, object], watcher: ClientWatcher, positions: Mapping[tuple[str, int], int]
    ) -> None:
        self._base, self._watcher = base, watcher
        self._pulse = Pulse(f"the reader of {sorted(positions)}")
        self._consumer = create(Consumer, listening(base, self._pulse))
        self._closed = False
        self._at: dict[tuple[str, int], int] = {}
        try:
            assignment = [self._position(topic, p, at) for (topic, p), at in positions.items()]
        except BusError:
            self._consumer.close()
            raise
        self._consumer.assign(assignment)
        watcher.watch(self._pulse)

    def _begin_anew(self) -> None:
        """Leave a silent client behind. It is dropped, not closed: nobody hears its farewell."""
        self._watcher.forget(self._pulse)
        self._pulse = Pulse(f"the reader of {sorted(self._at)}")
        self._consumer = create(Consumer, listening(self._base, self._pulse))
        self._consumer.assign([TopicPartition(topic, p, at) for (topic, p), at in self._at.items()])
        self._watcher.watch(self._pulse)

    def _position(self, topic: str, partition: int, offset: int) -> TopicPartition:
        if not any(name == topic for name, _ in self._at):
            know_topic(self._consumer, topic)
        if offset in (EARLIEST, LATEST):
            where = TopicPartition(topic, partition)
            act = f"asking where {topic}[{partition}] begins and ends"
            ends = patient(
                lambda: self._consumer.get_watermark_offsets(where, timeout=WAIT_S), self._consumer, [topic], act
            )
            if ends is None:
                raise UnreachableError(f"{topic}[{partition}] does not say where it begins. Check the broker.")
            offset = ends[0] if offset == EARLIEST else ends[1]
        self._at[topic, partition] = offset
        return TopicPartition(topic, partition, offset)

    def poll(self, max_records: int, timeout_s: float) -> list[Record]:
        if self._pulse.lost:
            self._begin_anew()
        self._pulse.note_wait()
        try:
            messages = take(self._consumer, max_records, timeout_s)
        except KafkaException as error:
            raise_ours(error, f"following {sorted(self._at)}")
        records = records_of(messages, f"following {sorted(self._at)}")
        for record in records:
            self._at[record.topic, record.partition] = record.offset + 1
        return records

    def positions(self) -> dict[tuple[str, int], int]:
        return dict(self._at)

    def seek(self, topic: str, partition: int, offset: int) -> None:
        position = self._position(topic, partition, offset)
        self._consumer.incremental_unassign([TopicPartition(topic, partition)])
        self._consumer.incremental_assign([position])

    def add(self, topic: str, partition: int, offset: int) -> None:
        self._consumer.incremental_assign([self._position(topic, partition, offset)])

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._watcher.forget(self._pulse)
            self._consumer.close()
