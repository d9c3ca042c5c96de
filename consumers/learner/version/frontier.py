"""How far the trajectories of each partition are settled: the offsets that a version's commit carries.

Invariants: a partition's frontier is its lowest place still unresolved or unconsumed, else one past the highest place
known; it never falls. A group is known from the moment seal names its places in `completions`, and settled once it was
resolved negatively or once a version that trained on it is committed. These offsets serve lag, retention and fencing:
what is trained next is the ledger's seq_hi alone. Pure fold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from millrace.schemas.records import Completion, Place, Resolution


@dataclass(slots=True)
class Frontier:
    """State of the fold over `completions` and `resolutions`. Feed completions first, up to a later point."""

    _open: dict[str, list[Place]] = field(default_factory=dict)
    _early: set[str] = field(default_factory=set)
    _seqs: dict[int, str] = field(default_factory=dict)
    _high: dict[int, int] = field(default_factory=dict)
    _floor: int = 0

    def complete(self, completion: Completion) -> None:
        """Seal sealed places of a group."""
        if completion["kind"] == "progress":
            return
        self._saw(completion["trajectories"])
        if completion["group"] not in self._early:
            self._open[completion["group"]] = list(completion["trajectories"])

    def resolve(self, resolution: Resolution) -> None:
        """Dispatch decided about a group."""
        if resolution["kind"] == "setting":
            return
        self._saw(resolution["trajectories"])
        group, seq = resolution["group"], resolution["seq"]
        if resolution["kind"] == "ready" and seq is not None:
            if seq >= self._floor:
                self._open[group] = list(resolution["trajectories"])
                self._seqs[seq] = group
            else:
                self._close(group)
        else:
            self._close(group)

    def commit(self, seq_hi: int) -> None:
        """A version up to `seq_hi` is committed."""
        self._floor = max(self._floor, seq_hi)
        for seq in [seq for seq in self._seqs if seq < self._floor]:
            self._open.pop(self._seqs.pop(seq), None)

    def offsets(self, seq_hi: int) -> dict[int, int]:
        """Next offset per partition once everything below `seq_hi` is consumed."""
        consumed = {group for seq, group in self._seqs.items() if seq < seq_hi}
        low = dict(self._high)
        for group, places in self._open.items():
            if group not in consumed:
                for place in places:
                    low[place["partition"]] = min(low[place["partition"]], place["offset"])
        return low

    def _close(self, group: str) -> None:
        if self._open.pop(group, None) is None:
            self._early.add(group)

    def _saw(self, places: Sequence[Place]) -> None:
        for place in places:
            self._high[place["partition"]] = max(self._high.get(place["partition"], 0), place["offset"] + 1)
