"""From places to trajectories: the one reader that learner, replay and selections share.

Invariants: what comes back is in the order that was asked for; a place whose record cannot be read any more comes back
as `LostRecord` with the reason, never as an exception, so that one bad record stops nobody; an unreachable log is an
exception, since it says nothing about the records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from millrace.infra.errors import ClaimError, ConfigError, StorageError, TopicError, UnreachableError
from millrace.infra.log.base import Bus, Place, Record
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.history.kinds import TRAJECTORIES
from millrace.infra.log.history.rows import row_of
from millrace.schemas.errors import SchemaError
from millrace.schemas.records import Trajectory

GONE = "gone from the log"
CLAIM = "its claimed bytes are missing or altered"
CORRUPT = "not a trajectory that this release reads"


@dataclass(frozen=True, slots=True)
class LostRecord:
    """A record that cannot be read any more. `reason`: one of this module's; `detail`: in words."""

    reason: str
    detail: str


ReadResult: TypeAlias = Trajectory | LostRecord


class PlaceReader:
    """Fetches trajectories by place; claims are resolved."""

    def __init__(self, bus: Bus, claims: ClaimStore) -> None:
        self._bus = bus
        self._claims = claims
        self._partitions: dict[str, int] = {}

    def trajectories(self, places: Sequence[Place]) -> list[ReadResult]:
        """The trajectory at each place, same order. Raises UnreachableError."""
        possible = [place for place in places if self._may_be(place)]
        records = dict(zip(possible, self._bus.fetch(possible) if possible else [], strict=True))
        return [self._read(place, records.get(place)) for place in places]

    def _may_be(self, place: Place) -> bool:
        """Whether there is such a partition to ask."""
        if place.topic not in self._partitions:
            try:
                self._partitions[place.topic] = self._bus.partitions(place.topic)
            except (ConfigError, TopicError):
                return False
        return 0 <= place.partition < self._partitions[place.topic] and place.offset >= 0

    def _read(self, place: Place, record: Record | None) -> ReadResult:
        where = f"{place.topic}/{place.partition}@{place.offset}"
        if record is None or record.value is None:
            return LostRecord(GONE, f"{where} holds no committed record (any more)")
        try:
            trajectory: Trajectory = row_of(TRAJECTORIES, record, self._claims.resolve).record
            return trajectory
        except StorageError as error:
            raise UnreachableError(str(error)) from error
        except ClaimError as error:
            return LostRecord(CLAIM, f"{where}: {error}")
        except SchemaError as error:
            return LostRecord(CORRUPT, f"{where}: {error}")
