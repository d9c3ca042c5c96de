"""Follows the versions, the resolutions and the workers of one policy: all that a live view needs, from topics
alone."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from millrace.infra.log.base import Bus
from millrace.infra.log.history.follow import Follower
from millrace.infra.log.history.kinds import LEDGER, RESOLUTIONS, WEIGHTS, WORKERS
from millrace.infra.log.history.reader import History, left_out
from millrace.infra.log.history.rows import Row
from millrace.schemas.records import LedgerEntry, Resolution, WeightVersion, WorkerStatus


@dataclass
class StatusWatch:
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
    began: bool = False
    """whether version 0 exists"""
    in_force: dict[str, Any] = field(default_factory=dict)
    """what dispatch goes by, by the name of the setting"""

    def __post_init__(self) -> None:
        history = History(self.bus, self.namespace, self.policy)
        self._follower = Follower(history, [LEDGER, RESOLUTIONS, WEIGHTS, WORKERS], left_out)

    def poll(self, timeout_s: float) -> bool:
        """Reads what came within `timeout_s`; True when there was a new version."""
        before = len(self.versions)
        self._fold(self._follower.poll(timeout_s))
        return len(self.versions) > before

    def catch_up(self) -> None:
        """Reads all that was written before this call, however fast more comes."""
        self._fold(self._follower.catch_up())

    def _fold(self, rows: Iterable[Row[Any]]) -> None:
        now = time.monotonic()
        for row in rows:
            match row.kind:
                case "ledger":
                    self.began = True
                    entry: LedgerEntry = row.record
                    if entry["version"] > 0:
                        self.versions.append(entry)
                case "resolutions":
                    resolution: Resolution = row.record
                    self.resolved[resolution["kind"]] += 1
                    self.last_resolution = now
                    if resolution["setting"] is not None:
                        with suppress(ValueError, RecursionError):  # no JSON: what was in force before is shown on
                            self.in_force[resolution["setting"]["name"]] = json.loads(resolution["setting"]["value"])
                    if resolution["seq"] is not None:
                        self.ready = max(self.ready, resolution["seq"] + 1)
                case "weights":
                    event: WeightVersion = row.record
                    if event["version"] == 0:  # a decision may have been read before it
                        self.in_force.setdefault("group_size", event["group_size"])
                case "workers":
                    status: WorkerStatus = row.record
                    if status["policy"] in (None, self.policy):
                        self.workers[status["worker"]] = status

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
        self._follower.close()


def _between(versions: Sequence[LedgerEntry]) -> float:
    return (versions[-1]["time"] - versions[0]["time"]) / 1e6 if versions else 0.0
