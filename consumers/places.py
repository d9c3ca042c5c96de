"""From places to trajectories: the one reader that learner, replay and selections share.

Invariants: what comes back is in the order that was asked for; a place whose record cannot be read any more comes back
as `Lost` with the reason, never as an exception, so that one bad record stops nobody; an unreachable log is an
exception, since it says nothing about the records.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

from infra.bus.base import Bus, Place, Record
from infra.claims import ClaimStore
from infra.errors import ClaimError
from schemas import codec
from schemas.errors import SchemaError
from schemas.records import Trajectory

GONE = "gone from the log"
CLAIM = "its claimed bytes are missing or altered"
CORRUPT = "not a trajectory that this release reads"


@dataclass(frozen=True, slots=True)
class Lost:
    """A record that cannot be read any more. `reason`: one of this module's; `detail`: in words."""

    reason: str
    detail: str


Found: TypeAlias = Trajectory | Lost


class PlaceReader:
    """Fetches trajectories by place; claims are resolved."""

    def __init__(self, bus: Bus, claims: ClaimStore) -> None:
        self._bus = bus
        self._claims = claims

    def trajectories(self, places: Sequence[Place]) -> list[Found]:
        """The trajectory at each place, same order. Raises UnreachableError."""
        records = self._bus.fetch(places) if places else []
        return [self._read(place, record) for place, record in zip(places, records, strict=True)]

    def _read(self, place: Place, record: Record | None) -> Found:
        where = f"{place.topic}/{place.partition}@{place.offset}"
        if record is None or record.value is None:
            return Lost(GONE, f"{where} holds no committed record (any more)")
        try:
            value = self._claims.resolve(record).value or b""
            return cast(Trajectory, codec.decode_as("Trajectory", value))
        except ClaimError as error:
            return Lost(CLAIM, f"{where}: {error}")
        except SchemaError as error:
            return Lost(CORRUPT, f"{where}: {error}")


def places(topic_places: Iterable[tuple[str, int, int]]) -> list[Place]:
    """Places from (topic, partition, offset)."""
    return [Place(*one) for one in topic_places]
