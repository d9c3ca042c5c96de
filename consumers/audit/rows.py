"""What the claims look at: a decoded record with its place, and a sample with the model calls it was made of."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from infra.bus.base import Place, Record
from schemas.arrays import unpack
from schemas.codec import decode_body

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


def place_of(record: dict[str, Any]) -> Place:
    """The bus's place of a schema's place."""
    return Place(record["topic"], record["partition"], record["offset"])


class Mark(NamedTuple):
    """What is kept of a row to name it later."""

    place: Place
    time: int


class Row:
    """One decoded record. `value` is its bytes, those behind a claim where it was one."""

    def __init__(self, raw: Record, name: str, record: dict[str, Any], value: bytes) -> None:
        self.raw = raw
        self.name = name
        self.record = record
        self.value = value

    def __getitem__(self, field: str) -> Any:
        return self.record[field]

    @property
    def place(self) -> Place:
        return self.raw.place

    @property
    def mark(self) -> Mark:
        return Mark(self.raw.place, self.raw.timestamp)

    @cached_property
    def body(self) -> dict[str, Any]:
        """The body of an event. Raises SchemaError when it does not decode."""
        return decode_body(self.record["kind"], self.record["body"])

    def places(self, field: str = "trajectories") -> list[Place]:
        """A list of places that the record holds."""
        return [place_of(place) for place in self.record[field]]


class Trace:
    """The arrays of one lineage. All of length T when they are consistent."""

    def __init__(self, lineage: dict[str, Any]) -> None:
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


class Sample:
    """A sealed trajectory and the model calls it names (None where an event is gone)."""

    def __init__(self, row: Row, places: Sequence[Place], calls: Sequence[Row | None]) -> None:
        self.row = row
        self.events = places
        self.calls = calls

    @cached_property
    def traces(self) -> list[Trace]:
        """Its lineages. Raises CorruptRecord for arrays that are none."""
        return [Trace(lineage) for lineage in self.row["lineages"]]

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
