"""The logs of a whole world (`tests.support.history`) and what a test may do to them: read, write, copy, forge."""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from millrace.consumers.scores import with_id
from millrace.infra.log.base import NO_HEADERS, Outgoing, Place, Record
from millrace.infra.log.history.kinds import SHARED_KINDS
from millrace.infra.log.history.ledger import chain_entry
from millrace.infra.log.memory.bus import MemoryBus
from millrace.infra.log.topics import TopicSizes, full_name, stages_of, turns_of
from millrace.schemas import codec
from millrace.schemas.chain import START, event_hash
from tests.support.history_records import POLICY

NS = "test"
SLOTS, SHARDS = 2, 4
SECOND = 1_000_000

Out = tuple[str, str, str, Mapping[str, Any], int | None]
"""kind of topic, key, record name, record, partition"""


class Log:
    """Every topic of one deployment, empty. `kind` names of topics are the logical ones without the policy."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 1_700_000_000 * SECOND
        self.bus = MemoryBus(clock=lambda: self.now)
        self.bus.ensure_topics(TopicSizes(NS, POLICY, SLOTS, SHARDS).specs())

    # -- names

    def topic(self, kind: str) -> str:
        if kind.startswith("turns."):
            return full_name(NS, turns_of(stages_of(POLICY)[kind.removeprefix("turns.")]))
        return full_name(NS, kind if kind in SHARED_KINDS else f"{POLICY}.{kind}")

    def id(self, prefix: str) -> str:
        return f"{prefix}-{self.rng.getrandbits(48):012x}"

    # -- writing

    def commit(self, outs: Sequence[Out], headers: Mapping[str, bytes] = NO_HEADERS) -> list[Place]:
        """One transaction; sometimes an aborted one before it."""
        self.now += self.rng.randrange(1000, 50_000)
        with self.bus.transactor("history") as transactor:
            for keep in [False, True] if self.rng.random() < 0.2 else [True]:
                transactor.begin()
                sent = [
                    transactor.send(Outgoing(self.topic(kind), key.encode(), codec.encode(name, record), headers, at))
                    for kind, key, name, record, at in outs
                ]
                transactor.flush()
                places = [handed.place for handed in sent]
                if keep:
                    transactor.commit({}, None)
                else:
                    transactor.abort()
        return places

    # -- what tests do to it

    def copy(self) -> Self:
        """The same world to break; logs are copied, records are not."""
        other = copy.copy(self)
        other.bus = MemoryBus(clock=lambda: self.now)
        other.bus.ensure_topics(list(self.bus.specs.values()))
        for topic, logs in self.bus.logs.items():
            for partition, log in enumerate(logs):
                other.bus.logs[topic][partition].entries = list(log.entries)
        return other

    def rows(self, kind: str) -> list[tuple[Record, dict[str, Any]]]:
        """Decoded records of every partition, in order; progress and bad bytes left out."""
        found = []
        for partition in range(self.bus.partitions(self.topic(kind))):
            for record in self.bus.read(self.topic(kind), partition):
                if (record.value or b"")[:2] == codec.MARK and codec.name_of(record.value or b"") != "Progress":
                    found.append((record, codec.decode(record.value or b"")[1]))
        return found

    def rewrite(self, record: Record, value: Mapping[str, Any] | bytes | None) -> None:
        """Put other bytes where a record lies; None takes it out."""
        entries = self.bus.logs[record.topic][record.partition].entries
        if isinstance(value, Mapping):
            value = codec.encode(codec.name_of(record.value or b""), value)
        entries[record.offset] = None if value is None else replace(record, value=value)

    def append(self, kind: str, name: str, value: Mapping[str, Any], key: str, partition: int = 0) -> Place:
        """One more record at the end."""
        out = Outgoing(self.topic(kind), key.encode(), codec.encode(name, value), {}, partition)
        return self.bus.publisher().publish(out).result()

    def forge_ledger(self) -> None:
        """Link the ledger's entries anew, as someone would who can write, and what names them."""
        prev = b""
        known = {}
        for record, entry in self.rows("ledger"):
            linked = dict(chain_entry(entry, prev))  # type: ignore[arg-type]
            prev = linked["hash"]
            known[entry["version"]] = {"digest": entry["digest"], "ledger_hash": prev.hex()}
            self.rewrite(record, linked)
        for record, scored in self.rows("scores"):
            self.rewrite(record, with_id(scored | known.get(scored["version"], {})))  # type: ignore[arg-type]

    def forge_events(self) -> None:
        """Link the events of every slot anew."""
        prev: dict[int, bytes] = defaultdict(lambda: START)
        for record, event in self.rows("events"):
            event["prev_hash"] = prev[record.partition]
            event["hash"] = prev[record.partition] = event_hash(event["prev_hash"], event)
            self.rewrite(record, event)
