"""Which version trained a trajectory, by its place.

Invariant: sixteen bytes a trained trajectory, however long the history is, for any number that an entry may hold."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable

from millrace.formats.exports.select import VersionRange
from millrace.infra.log.base import Place
from millrace.schemas.records import LedgerEntry


class TrainingVersions:
    """Versions by the places that the ledger names, lost groups left out."""

    def __init__(self, topic: str, entries: Iterable[LedgerEntry]) -> None:
        found: dict[int, list[tuple[int, int]]] = {}
        for entry in entries:
            for group in entry["groups"]:
                for place in group["trajectories"]:
                    if group["lost"] is None and place["topic"] == topic:
                        found.setdefault(place["partition"], []).append((place["offset"], entry["version"]))
        self._topic = topic
        self._offsets: dict[int, array[int]] = {}
        self._versions: dict[int, array[int]] = {}
        for partition, pairs in found.items():
            pairs.sort()
            self._offsets[partition] = array("q", (offset for offset, _ in pairs))
            self._versions[partition] = array("q", (version for _, version in pairs))

    def offsets(self, topic: str, partition: int, versions: VersionRange) -> list[int]:
        """Where the trajectories of a topic's partition lie that these versions trained on, ascending."""
        if topic != self._topic or partition not in self._offsets:
            return []
        offsets = self._offsets[partition]
        chosen = [at for at, version in zip(offsets, self._versions[partition], strict=True) if versions.holds(version)]
        return list(dict.fromkeys(chosen))

    def version(self, place: Place) -> int | None:
        """The version that trained on the trajectory at a place, None when none did."""
        offsets = self._offsets.get(place.partition)
        if offsets is None or place.topic != self._topic:
            return None
        at = bisect_left(offsets, place.offset)
        return self._versions[place.partition][at] if at < len(offsets) and offsets[at] == place.offset else None
