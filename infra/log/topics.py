"""The one table of topics: their names, keys, partitions, cleanup and retention, and which partition a key goes to.

Invariants: a full name is `<namespace>.<logical name>` and the namespace holds no dot; a topic is kept at least as long
as what points into it; `partition_of` gives what Kafka's own partitioners give (murmur2 of the key), so that our
writers, Java's and librdkafka's `murmur2_random` agree.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from millrace.infra.errors import ConfigError
from millrace.infra.log.base import TopicSpec

Size = Literal["slots", "shards", "one"]
Cleanup = Literal["short", "long", "all", "compact"]

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
HOUR_MS = 3_600_000
PARTS = 24
"""parts in which what is kept for short is forgotten: nothing of it outlives its hours by more than one part"""


@dataclass(frozen=True, slots=True)
class Topic:
    """One row. `name` is logical and may hold `{policy}`; `cleanup` says how long records are kept."""

    name: str
    key: str
    size: Size
    cleanup: Cleanup
    what: str


TOPICS = (
    Topic("raw", "tenant/group", "slots", "short", "events as captured; restricted"),
    Topic("events", "tenant/group", "slots", "long", "events after governance: the history"),
    Topic("dead-letters", "as source", "slots", "long", "a reference to what could not be processed, and why"),
    Topic("{policy}.prompts", "prompt", "one", "long", "tasks to roll out"),
    Topic("{policy}.grants", "ticket", "slots", "long", "permission to start one group"),
    Topic("{policy}.trajectories", "group", "shards", "long", "sealed, rewarded trajectories: what learners read"),
    Topic("{policy}.evaluations", "group", "slots", "long", "sealed evaluation traffic, which never trains"),
    Topic("{policy}.completions", "group", "one", "long", "a group is complete; also top-ups and seal's progress"),
    Topic("{policy}.resolutions", "group", "one", "long", "what became of every group and ticket"),
    Topic("{policy}.weights", "policy", "one", "all", "one event a weight version"),
    Topic("{policy}.ledger", "version", "one", "all", "what trained each version"),
    Topic("{policy}.scores", "version", "one", "all", "what versions came to on held-out tasks"),
    Topic("workers", "worker", "one", "compact", "status and weight-loaded acknowledgements"),
    Topic("decisions", "artifact", "one", "all", "settings asked for; governance decisions"),
    Topic("principals", "key/act", "one", "compact", "keys of clients: grants, revocations, last use"),
)

STAGES: Mapping[str, Size] = {"refine": "slots", "seal": "slots", "{policy}.dispatch": "one"}
"""The stages with state: each has a changelog and a topic of turns with as many partitions as its primary. A stage's
name is also that of its group and of its transactional ids, so one that belongs to a policy carries its name."""


@dataclass(frozen=True, slots=True)
class TopicSizes:
    """What sizes a deployment's topics: N slots, S shards, and how many hours short and long topics are kept."""

    namespace: str
    policy: str
    slots: int = 2
    shards: int = 8
    short_hours: int = 24
    long_hours: int = 24 * 90

    def specs(self) -> list[TopicSpec]:
        """Every topic of the deployment with this policy, by full name."""
        return [
            TopicSpec(full_name(self.namespace, topic.name.format(policy=self.policy)), self._count(topic), config)
            for topic in self._rows()
            for config in [self._config(topic)]
        ]

    def topics(self) -> Iterator[tuple[Topic, TopicSpec]]:
        """Rows of the table next to what they become here."""
        return zip(self._rows(), self.specs(), strict=True)

    def _rows(self) -> list[Topic]:
        return [*TOPICS, *(row for name, size in STAGES.items() for row in stage_topics(name, size))]

    def _count(self, topic: Topic) -> int:
        return {"slots": self.slots, "shards": self.shards, "one": 1}[topic.size]

    def _config(self, topic: Topic) -> dict[str, str]:
        match topic.cleanup:
            case "compact":
                # Small, short segments: only closed ones are compacted, and a restore reads what is left.
                return {"cleanup.policy": "compact", "segment.ms": "600000", "min.cleanable.dirty.ratio": "0.3"}
            case "all":
                return {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"}
            case "short" | "long":
                hours = self.short_hours if topic.cleanup == "short" else self.long_hours
                config = {"cleanup.policy": "delete", "retention.ms": str(hours * HOUR_MS), "retention.bytes": "-1"}
                # Kafka deletes whole segments, and by default one of a quiet topic takes a week to close.
                return config | ({"segment.ms": str(hours * HOUR_MS // PARTS)} if topic.cleanup == "short" else {})


def stage_topics(stage: str, size: Size) -> tuple[Topic, Topic]:
    """The two topics that the runner keeps for a stage."""
    return (
        Topic(changelog_of(stage), "slot/key", size, "compact", f"state of {_role(stage)}"),
        Topic(turns_of(stage), "slot", size, "long", f"what each turn of {_role(stage)} folded"),
    )


def stages_of(policy: str) -> dict[str, str]:
    """Names of the stages that a policy goes through, by role: refine, seal, dispatch."""
    return {_role(name): name.format(policy=policy) for name in STAGES}


def _role(stage: str) -> str:
    return stage.rpartition(".")[2]


def changelog_of(stage: str) -> str:
    """Logical name of the topic with a stage's state."""
    return f"changelog.{stage}"


def turns_of(stage: str) -> str:
    """Logical name of the topic with a stage's turns."""
    return f"turns.{stage}"


def full_name(namespace: str, name: str) -> str:
    """`<namespace>.<name>`. Raises ConfigError for a namespace that could not be told from the name again."""
    if not NAME.fullmatch(namespace):
        raise ConfigError(f"namespace {namespace!r} must be letters, digits, '-' and '_', with no dot")
    return f"{namespace}.{name}"


def logical_name(name: str) -> str:
    """The name without its namespace."""
    return name.partition(".")[2]


def partition_of(key: bytes | str, partitions: int) -> int:
    """The partition that Kafka's default partitioner gives a key: murmur2, sign dropped, modulo the count."""
    return murmur2(key.encode() if isinstance(key, str) else key) % partitions


@lru_cache(maxsize=65_536)
def murmur2(data: bytes) -> int:
    """Kafka's murmur2 (Austin Appleby's, seed 0x9747b28c) of `data` with the sign bit dropped: 0 to 2**31 - 1."""
    mask, m = 0xFFFFFFFF, 0x5BD1E995
    size = len(data)
    h = 0x9747B28C ^ size
    block_end = size & ~3
    for at in range(0, block_end, 4):
        k = int.from_bytes(data[at : at + 4], "little") * m & mask
        k = (k ^ k >> 24) * m & mask
        h = h * m & mask ^ k
    if block_end < size:
        h = (h ^ int.from_bytes(data[block_end:], "little")) * m & mask
    h = (h ^ h >> 13) * m & mask
    return (h ^ h >> 15) & 0x7FFFFFFF
