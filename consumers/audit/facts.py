"""What several laws must know: the settings in force, what trained what, and where the topics begin.

Invariants: built from weights, ledger and resolutions before any trajectory is seen; a setting holds from its seq or
ticket on until the next one of its name, and version 0's until the first."""

from __future__ import annotations

import json
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from millrace.infra.log.base import Place
from millrace.infra.log.history.rows import Mark, Row
from millrace.infra.log.topics import stages_of, turns_of
from millrace.schemas.records import Decision, Grant, LedgerEntry, Prompt, Resolution, WeightVersion

Value = TypeVar("Value")


class Timeline(Generic[Value]):
    """Values of one setting by the position from which each holds."""

    def __init__(self) -> None:
        self._from: list[int] = []
        self._values: list[Value] = []

    def set(self, position: int, value: Value) -> None:
        """From `position` on; what was set for it or a later one is replaced."""
        at = bisect_left(self._from, position)
        self._from[at:], self._values[at:] = [position], [value]

    def at(self, position: int) -> Value | None:
        """The value in force, None before the first."""
        at = bisect_right(self._from, position)
        return self._values[at - 1] if at else None

    def until(self, position: int) -> int | None:
        """The first position after `position` at which another value holds."""
        at = bisect_right(self._from, position)
        return self._from[at] if at < len(self._from) else None


HARD = frozenset({"reserve", "reject", "mask-head"})
"""release policies that promise a staleness bound"""


class CommittedGroup(NamedTuple):
    """A group inside a committed version."""

    version: int
    seq: int
    ticket: int | None
    group: str
    ledger: Mark
    loss: str | None


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
        low = int(keys.searchsorted(key))
        if low == len(keys) or keys[low] != key:
            return []
        high = int(keys.searchsorted(key, "right"))
        self._seen[low:high] = True
        return [int(value) for value in self._order[low:high]]

    def unseen(self) -> Iterator[tuple[int, int, int]]:
        """(partition, offset, value) of every pair whose place was never taken."""
        keys = self._freeze()
        for at in np.flatnonzero(~self._seen):
            key = int(keys[at])
            yield key >> 48, key & (1 << 48) - 1, int(self._order[at])


class Facts:
    """The shared knowledge of one walk. `topics` are full names by kind; `starts` by kind and partition; `latest` gives
    the last readable record of a kind that was committed since the walk took its ends, None where there is none;
    `has_moved` tells whether anything was written to a partition of a kind since then; `root`: where versions lie now,
    empty where nobody says."""

    def __init__(
        self,
        policy: str,
        topics: Mapping[str, str],
        starts: Mapping[str, Mapping[int, int]],
        release: str,
        latest: Callable[[str], Row | None],
        has_moved: Callable[[str, int], bool] = lambda kind, partition: True,
        root: str = "",
    ) -> None:
        self.root = root
        self.policy = policy
        self.stages = {turns_of(role): name for role, name in stages_of(policy).items()}
        """names of stages by the kind of topic that holds their turns"""
        self.latest = latest
        self.has_moved = has_moved
        self.topics = topics
        self.starts = starts
        self.release: Timeline[str] = Timeline()
        self.release.set(0, release)
        self.batch: Timeline[int] = Timeline()
        self.eta: Timeline[int] = Timeline()
        self.trained: list[CommittedGroup] = []
        self.trained_at = PlaceIndex()
        self.ready: dict[int, tuple[int, int]] = {}
        """(min_version, deadline) by seq"""
        self.spans: dict[int, tuple[int, int]] = {}
        """(v_head, v_tail) by seq"""
        self.last_version = -1
        self.parent_policy: str | None = None
        """of a branch: the policy that it comes from"""
        self.selected: dict[int, int] = {}
        """of a branch, by version: how many places the selection has that it was trained on"""
        self.selection_digest = ""
        """of a branch: the digest of those places, as its first trained version says it"""
        self.began: dict[str, Any] = {}
        """settings as dispatch wrote them when the policy began"""
        self.waits: Counter[int] = Counter()
        """grants by reward deadline in ms: a setting that only grants record"""
        self.awaited: dict[tuple[str, ...], set[str]] = {}
        """awaited sources -> prompts granted with them that name none themselves, two at most: the other one"""
        self.asking: set[str] = set()
        """prompts that name the sources of their rewards themselves"""

    def begins_at_zero(self, kind: str) -> bool:
        """Whether this kind of topic still has its beginning."""
        return not any(self.starts[kind].values())

    def is_ours(self, topic: str) -> bool:
        """Whether a logical topic is shared or this policy's."""
        return "." not in topic or topic.startswith(f"{self.policy}.")

    def kind(self, topic: str) -> str:
        """The kind of a logical topic, or the role of a stage: its name without the policy."""
        return topic.removeprefix(f"{self.policy}.")

    def is_gone(self, kind: str, place: Place) -> bool:
        """Whether retention has taken this place."""
        return place.offset < self.starts[kind].get(place.partition, 0)

    def trained_in(self, place: Place) -> list[CommittedGroup]:
        """The trained groups that name this trajectory."""
        if place.topic != self.topics["trajectories"]:
            return []
        return [self.trained[at] for at in self.trained_at.take(place)]

    def patience(self, decision: Row[Decision]) -> int | None:
        """How many micros of log time a decision lets groups of this policy wait for their samples, if it is about
        that."""
        if (decision["kind"], decision["policy"], decision["name"]) != ("setting", self.policy, "sealing"):
            return None
        terms = json.loads(decision["value"])
        return int(terms["patience_ms"]) * 1000 if isinstance(terms, dict) else None

    def weights(self, row: Row[WeightVersion]) -> None:
        self.last_version = max(self.last_version, row["version"])
        if row["selection"] is not None:
            self.selected[row["version"]] = row["selection_places"] or 0
            self.selection_digest = self.selection_digest or row["selection_digest"] or ""
        if row["version"] == 0:
            self.parent_policy = row["parent_policy"]
            if row["batch"] is not None:
                self.batch.set(0, row["batch"])
            if row["eta"] is not None:
                self.eta.set(0, row["eta"])

    def ledger(self, row: Row[LedgerEntry]) -> None:
        if row["version"] in self.selected:
            return  # it took nothing of this policy's own order
        for group in row["groups"]:
            entry = CommittedGroup(
                row["version"], group["seq"], group["ticket"], group["group"], row.mark, group["lost"]
            )
            at = len(self.trained)
            self.trained.append(entry)
            for place in group["trajectories"]:
                if place["topic"] == self.topics["trajectories"]:
                    self.trained_at.add(Place(place["topic"], place["partition"], place["offset"]), at)

    def prompt(self, row: Row[Prompt]) -> None:
        if row["awaits"]:
            self.asking.add(row["id"])

    def grant(self, row: Row[Grant]) -> None:
        self.waits[row["reward_deadline_ms"]] += 1
        if row["prompt_id"] not in self.asking:
            prompts = self.awaited.setdefault(tuple(row["awaits"]), set())
            if len(prompts) < 2:
                prompts.add(row["prompt_id"])

    def resolution(self, row: Row[Resolution]) -> None:
        setting = row["setting"]
        if row["kind"] == "ready" and row["seq"] is not None:
            self.ready[row["seq"]] = (row["min_version"], row["deadline"])
            self.spans[row["seq"]] = (row["v_head"], row["v_tail"])
        elif row["kind"] == "setting" and setting is not None:
            value = json.loads(setting["value"])
            if setting["decision"] is None:
                self.began.setdefault(setting["name"], value)
            match setting["name"]:
                case "batch":
                    self.batch.set(setting["from_seq"] or 0, int(value))
                case "eta":
                    self.eta.set(setting["from_ticket"] or 0, int(value))
                case "release":
                    self.release.set(setting["from_seq"] or 0, str(value))
