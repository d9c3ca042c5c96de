"""What the laws look at: a decoded record with its place, and a sample with the model calls it was made of."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from millrace.infra.log.base import Place
from millrace.infra.log.history.rows import Mark, Row, place_of
from millrace.schemas.arrays import unpack
from millrace.schemas.records import Event, Lineage, Trajectory

__all__ = ["Floats", "Ints", "Mark", "Row", "SealedSample", "SealedTrace", "place_of"]

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


class SealedTrace:
    """The arrays of one lineage. All of length T when they are consistent."""

    def __init__(self, lineage: Lineage) -> None:
        self.id: str = lineage["id"]
        self.calls: list[str] = lineage["calls"]
        self.tokens: Ints = unpack(lineage["tokens"])
        self.mask: npt.NDArray[np.bool_] = unpack(lineage["mask"]).astype(bool)
        self.logprobs: Floats = unpack(lineage["logprobs"])
        self.versions: Ints = unpack(lineage["versions"])

    @property
    def even(self) -> bool:
        """Whether all arrays have one length."""
        return len({len(self.tokens), len(self.mask), len(self.logprobs), len(self.versions)}) == 1

    @property
    def trained_versions(self) -> Ints:
        """Versions of the trainable tokens, as far as the arrays go."""
        size = min(len(self.mask), len(self.versions))
        return self.versions[:size][self.mask[:size]]


class SealedSample:
    """A sealed trajectory and the model calls it names (None where an event is gone)."""

    def __init__(self, row: Row[Trajectory], places: Sequence[Place], calls: Sequence[Row[Event] | None]) -> None:
        self.row = row
        self.events = places
        self.calls = calls

    @cached_property
    def traces(self) -> list[SealedTrace]:
        """Its lineages. Raises CorruptRecord for arrays that are none."""
        return [SealedTrace(lineage) for lineage in self.row["lineages"]]

    @cached_property
    def trained_versions(self) -> Ints:
        """int32: the version of every trainable token of every lineage."""
        parts = [trace.trained_versions for trace in self.traces]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    @property
    def ids(self) -> dict[str, str | int]:
        """What names it in a violation."""
        ids: dict[str, str | int] = {"trajectory": self.row["id"], "group": self.row["group"]}
        if self.row["ticket"] is not None:
            ids["ticket"] = self.row["ticket"]
        return ids
