"""Follows the ledger, the resolutions and the workers of one policy: all that a live view needs, from topics alone."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import cast

from infra.bus.base import EARLIEST, Bus, Record
from infra.topics import full_name
from schemas import codec
from schemas.records import LedgerEntry, WorkerStatus


@dataclass
class Watch:
    """`poll` reads what is new. Versions are the ledger's entries beyond version 0, in order."""

    bus: Bus
    namespace: str
    policy: str
    versions: list[LedgerEntry] = field(default_factory=list)
    resolved: Counter[str] = field(default_factory=Counter)
    last_resolution: float = 0.0
    """monotonic time at which the newest resolution was read"""
    ready: int = 0
    """one past the highest ready seq"""
    workers: dict[str, WorkerStatus] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [f"{self.policy}.ledger", f"{self.policy}.resolutions", "workers"]
        self._tail = self.bus.tail({(full_name(self.namespace, name), 0): EARLIEST for name in names})

    def poll(self, timeout_s: float) -> bool:
        """Reads what came within `timeout_s`; True when there was a new version."""
        before = len(self.versions)
        self._fold(self._tail.poll(2000, timeout_s))
        return len(self.versions) > before

    def catch_up(self) -> None:
        """Reads all that was written before this call, however fast more comes."""
        for (topic, partition), start in self._tail.positions().items():
            end = start
            for record in self.bus.read(topic, partition, start):
                self._fold([record])
                end = record.offset + 1
            self._tail.seek(topic, partition, end)

    def _fold(self, records: Iterable[Record]) -> None:
        now = time.monotonic()
        for record in records:
            if record.value is None:
                continue
            name, value = codec.decode(record.value)
            match name:
                case "LedgerEntry" if value["version"] > 0:
                    self.versions.append(cast(LedgerEntry, value))
                case "Resolution":
                    self.resolved[value["kind"]] += 1
                    self.last_resolution = now
                    if value["seq"] is not None:
                        self.ready = max(self.ready, value["seq"] + 1)
                case "WorkerStatus" if value["policy"] in (None, self.policy):
                    self.workers[value["worker"]] = cast(WorkerStatus, value)

    @property
    def version(self) -> int:
        """The newest version, 0 before the first."""
        return self.versions[-1]["version"] if self.versions else 0

    @property
    def rewards(self) -> list[float]:
        """Mean sampled reward of each version's batch."""
        return [entry["metrics"].get("reward_mean", 0.0) for entry in self.versions]

    @property
    def lag(self) -> int:
        """Ready groups that no version has consumed."""
        return self.ready - (self.versions[-1]["seq_hi"] if self.versions else 0)

    @property
    def seconds(self) -> float:
        """From the first version's commit to the newest's."""
        return _between(self.versions)

    def rate(self, metric: str, last: int = 5) -> float:
        """Sum of a metric over the newest versions, per second of the time they took; 0 for fewer than two."""
        recent = self.versions[-last - 1 :]
        amount = sum(entry["metrics"].get(metric, 0.0) for entry in recent[1:])
        return amount / max(1e-6, _between(recent))

    def close(self) -> None:
        """Stop following."""
        self._tail.close()


def _between(versions: Sequence[LedgerEntry]) -> float:
    return (versions[-1]["time"] - versions[0]["time"]) / 1e6 if versions else 0.0
