"""What several claims must know: the settings in force, what trained what, and where the topics begin.

Invariants: built from weights, ledger and resolutions before any trajectory is seen; a setting holds from its seq or
ticket on until the next one of its name, and version 0's until the first."""

from __future__ import annotations

import json
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from consumers.audit.rows import Mark, Row
from infra.bus.base import Place

HARD = frozenset({"reserve", "reject", "mask-head"})
"""release policies that promise a staleness bound"""


class Trained(NamedTuple):
    """A group inside a committed version."""

    version: int
    seq: int
    ticket: int | None
    group: str
    ledger: Mark
    lost: str | None


class PlaceIndex:
    """Place of one topic -> small integers, 16 bytes a pair. Frozen by the first look-up."""

    def __init__(self) -> None:
        self._keys = array("q")
        self._values = array("q")
        self._sorted: npt.NDArray[np.int64] | None = None
        self._order: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._seen: npt.NDArray[np.bool_] = np.zeros(0, bool)

    def add(self, place: Place, value: int) -> None:
        self._keys.append(place.partition << 48 | place.offset)
        self._values.append(value)

    def __len__(self) -> int:
        return len(self._keys)

    def _freeze(self) -> npt.NDArray[np.int64]:
        if self._sorted is None:
            keys = np.array(self._keys, np.int64)
            order = np.argsort(keys, kind="stable")
            self._sorted, self._order = keys[order], np.array(self._values, np.int64)[order]
            self._seen = np.zeros(len(keys), bool)
        return self._sorted

    def take(self, place: Place) -> list[int]:
        """The values under a place, which counts as seen from now on."""
        keys = self._freeze()
        key = place.partition << 48 | place.offset
        low = int(np.searchsorted(keys, key))
        if low == len(keys) or keys[low] != key:
            return []
        high = int(np.searchsorted(keys, key, "right"))
        self._seen[low:high] = True
        return [int(value) for value in self._order[low:high]]

    def unseen(self) -> Iterator[tuple[int, int, int]]:
        """(partition, offset, value) of every pair whose place was never taken."""
        keys = self._freeze()
        for at in np.flatnonzero(~self._seen):
            key = int(keys[at])
            yield key >> 48, key & (1 << 48) - 1, int(self._order[at])


class Timeline:
    """Values of one setting by the position from which each holds."""

    def __init__(self) -> None:
        self._from: list[int] = []
        self._values: list[Any] = []

    def set(self, position: int, value: Any) -> None:
        """From `position` on; what was set for it or a later one is replaced."""
        at = bisect_left(self._from, position)
        self._from[at:], self._values[at:] = [position], [value]

    def at(self, position: int) -> Any | None:
        """The value in force, None before the first."""
        at = bisect_right(self._from, position)
        return self._values[at - 1] if at else None

    def until(self, position: int) -> int | None:
        """The first position after `position` at which another value holds."""
        at = bisect_right(self._from, position)
        return self._from[at] if at < len(self._from) else None


class Facts:
    """The shared knowledge of one walk. `topics` are full names by kind; `starts` by kind and partition; `latest` gives
    the last readable record of a kind that was committed since the walk took its ends, None where there is none."""

    def __init__(
        self,
        policy: str,
        topics: Mapping[str, str],
        starts: Mapping[str, Mapping[int, int]],
        release: str,
        latest: Callable[[str], Row | None],
    ) -> None:
        self.policy = policy
        self.latest = latest
        self.topics = topics
        self.starts = starts
        self.release = Timeline()
        self.release.set(0, release)
        self.batch = Timeline()
        self.eta = Timeline()
        self.trained: list[Trained] = []
        self.trained_at = PlaceIndex()
        self.ready: dict[int, tuple[int, int]] = {}
        self.last_version = -1

    def begins_at_zero(self, kind: str) -> bool:
        """Whether this kind of topic still has its beginning."""
        return not any(self.starts[kind].values())

    def mine(self, topic: str) -> bool:
        """Whether a logical topic is shared or this policy's."""
        return "." not in topic or topic.startswith(f"{self.policy}.")

    def kind(self, topic: str) -> str:
        """The kind of a logical topic, or the role of a stage: its name without the policy."""
        return topic.removeprefix(f"{self.policy}.")

    def gone(self, kind: str, place: Place) -> bool:
        """Whether retention has taken this place."""
        return place.offset < self.starts[kind].get(place.partition, 0)

    def trained_in(self, place: Place) -> list[Trained]:
        """The trained groups that name this trajectory."""
        if place.topic != self.topics["trajectories"]:
            return []
        return [self.trained[at] for at in self.trained_at.take(place)]

    def weights(self, row: Row) -> None:
        self.last_version = max(self.last_version, row["version"])
        if row["version"] == 0:
            if row["batch"] is not None:
                self.batch.set(0, row["batch"])
            if row["eta"] is not None:
                self.eta.set(0, row["eta"])

    def ledger(self, row: Row) -> None:
        for group in row["groups"]:
            entry = Trained(row["version"], group["seq"], group["ticket"], group["group"], row.mark, group["lost"])
            at = len(self.trained)
            self.trained.append(entry)
            for place in group["trajectories"]:
                if place["topic"] == self.topics["trajectories"]:
                    self.trained_at.add(Place(place["topic"], place["partition"], place["offset"]), at)

    def resolution(self, row: Row) -> None:
        setting = row["setting"]
        if row["kind"] == "ready" and row["seq"] is not None:
            self.ready[row["seq"]] = (row["min_version"], row["deadline"])
        elif row["kind"] == "setting" and setting is not None:
            value = json.loads(setting["value"])
            match setting["name"]:
                case "batch":
                    self.batch.set(setting["from_seq"] or 0, int(value))
                case "eta":
                    self.eta.set(setting["from_ticket"] or 0, int(value))
                case "release":
                    self.release.set(setting["from_seq"] or 0, str(value))
