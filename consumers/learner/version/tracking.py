"""Committed versions as points of trackers: a projection of the ledger.

Invariants: only who commits writes, after the commit; what a tracker lacks (a leader was killed before it wrote, or
leads for the first time on this machine) is filled in from the ledger before the new version's point; a tracker that
fails never stops learning, and gets its point with the next version.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

from millrace.infra.config import Settings
from millrace.infra.log.base import Bus
from millrace.infra.log.history import ledger
from millrace.schemas.records import LedgerEntry
from millrace.trainers.tracking.base import Tracker
from millrace.trainers.tracking.registry import open_trackers

log = logging.getLogger(__name__)


class Tracking:
    """The trackers of `[learner] trackers`, opened when the first version is committed here."""

    def __init__(
        self,
        open: Callable[[], Sequence[Tracker]],
        past: Callable[[], Iterator[LedgerEntry]],
    ) -> None:
        """open: gives the trackers; past: the whole ledger."""
        self._open = open
        self._past = past
        self._trackers: Sequence[Tracker] | None = None

    @classmethod
    def of(cls, settings: Settings, bus: Bus, topic: str) -> Tracking:
        """As the settings say; `topic` is the policy's ledger."""
        place = settings.home / "tracking" / settings.policy.name
        run = f"{settings.namespace}.{settings.policy.name}"
        return cls(
            lambda: open_trackers(settings.learner.trackers, place, run),
            lambda: ledger.read(bus, topic),
        )

    def write(self, entry: LedgerEntry) -> None:
        """The point of a version that was committed."""
        try:
            if self._trackers is None:
                self._trackers = self._open()
            for tracker in self._trackers:
                self._fill(tracker, entry)
        except Exception as problem:
            # Whatever a tracker's library raises: a run is worth more than its curves, and the ledger has them.
            log.warning("version %d is not tracked yet: %s", entry["version"], problem)

    def close(self) -> None:
        """Let go of the trackers."""
        trackers, self._trackers = self._trackers or (), None
        for tracker in trackers:
            tracker.close()

    def _fill(self, tracker: Tracker, entry: LedgerEntry) -> None:
        # Version 0 trained on nothing and has no point.
        if max(tracker.last, 0) + 1 < entry["version"]:
            for older in self._past():
                if 0 < older["version"] < entry["version"]:
                    tracker.log(older["version"], older["metrics"])
        tracker.log(entry["version"], entry["metrics"])
