"""What `resolutions` says about the order of learning: the ready groups by seq, and the settings in force.

Invariants: batch k is the ready groups [seq_hi(k), seq_hi(k) + B), where B is the batch size in force at seq_hi(k); a
batch exists only once all of its groups are resolved; seqs below the last committed seq_hi are forgotten. Pure fold.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from millrace.infra.errors import LearnerError
from millrace.schemas import bounds
from millrace.schemas.records import Resolution

Value = TypeVar("Value")

MASK_HEAD = "mask-head"


@dataclass(frozen=True, slots=True)
class Batch:
    """The next ready groups, whole and in seq order, all trained from one version into the next."""

    seq_lo: int
    groups: tuple[Resolution, ...]
    eta: int

    @property
    def seq_hi(self) -> int:
        return self.seq_lo + len(self.groups)


@dataclass(slots=True)
class Steps(Generic[Value]):
    """A setting's value from a position (seq or ticket) on, until the next one."""

    at: list[int]
    values: list[Value]

    def set(self, position: int, value: Value) -> None:
        """The value holds from `position` on; what was set for a later position is replaced."""
        keep = bisect_right(self.at, position - 1)
        self.at[keep:], self.values[keep:] = [position], [value]

    def get(self, position: int) -> Value:
        """The value in force at `position`."""
        return self.values[max(0, bisect_right(self.at, position) - 1)]


@dataclass(slots=True)
class LearningOrder:
    """State of the fold. `batch`, `eta` and `release` are the policy's first settings, as version 0 carries them."""

    batch: int
    eta: int
    release: str
    floor: int = 0
    _ready_groups: dict[int, Resolution] = field(default_factory=dict)
    _batches: Steps[int] = field(init=False)
    _etas: Steps[int] = field(init=False)
    _releases: Steps[str] = field(init=False)

    def __post_init__(self) -> None:
        self._batches = Steps([0], [self.batch])
        self._etas = Steps([0], [self.eta])
        self._releases = Steps([0], [self.release])

    def fold(self, resolution: Resolution) -> None:
        """Take in the next record of `resolutions`."""
        if resolution["kind"] == "setting":
            self._set(resolution)
        elif resolution["kind"] == "ready":
            seq = resolution["seq"]
            if seq is None:
                raise LearnerError(f"ready group {resolution['group']} has no seq: `resolutions` is not dispatch's")
            if seq >= self.floor:
                self._ready_groups[seq] = resolution

    def _set(self, resolution: Resolution) -> None:
        setting = resolution["setting"]
        if setting is None:
            raise LearnerError("a setting resolution without its setting: `resolutions` is not dispatch's")
        try:
            value = json.loads(setting["value"])
        except (ValueError, RecursionError):
            raise LearnerError("a setting whose value is no JSON: `resolutions` is not dispatch's") from None
        if setting["name"] == "batch":
            self._batches.set(setting["from_seq"] or 0, _integer(value, 1, bounds.BATCH))
        elif setting["name"] == "eta":
            self._etas.set(setting["from_ticket"] or 0, _integer(value, 0, bounds.ETA))
        elif setting["name"] == "release":
            self._releases.set(setting["from_seq"] or 0, str(value))

    def commit(self, seq_hi: int) -> None:
        """A version up to `seq_hi` is committed: forget what lies below."""
        self.floor = max(self.floor, seq_hi)
        for seq in [seq for seq in self._ready_groups if seq < self.floor]:
            del self._ready_groups[seq]

    def size(self, seq: int) -> int:
        """B in force for a batch that begins at `seq`."""
        return self._batches.get(seq)

    def eta_of(self, resolution: Resolution) -> int:
        """The staleness bound under which a group was granted."""
        return self._etas.get(resolution["ticket"] or 0)

    def masks_head(self, seq: int) -> bool:
        """Whether tokens older than eta are masked by the learner, instead of guaranteed absent, from `seq` on."""
        return self._releases.get(seq) == MASK_HEAD

    def pending(self, seq: int) -> int:
        """How many groups of the batch that begins at `seq` are ready."""
        return sum(number in self._ready_groups for number in range(seq, seq + self.size(seq)))

    def next(self, seq: int) -> Batch | None:
        """The batch that begins at `seq`, or None while one of its groups is missing."""
        seqs = range(seq, seq + self.size(seq))
        if not all(number in self._ready_groups for number in seqs):
            return None
        groups = tuple(self._ready_groups[number] for number in seqs)
        return Batch(seq, groups, max(self.eta_of(group) for group in groups))


def _integer(value: object, low: int, high: int) -> int:
    if not isinstance(value, int) or not low <= value <= high:
        raise LearnerError(f"a setting outside {low} to {high:,}: `resolutions` is not dispatch's")
    return value
