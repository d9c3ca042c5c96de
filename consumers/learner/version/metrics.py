"""A committed version as metrics, as one line for people, and as points of trackers: a projection of the ledger.

Invariants: only who commits writes points, after the commit; what a tracker lacks (a leader was killed before it wrote,
or leads for the first time on this machine) is filled in from the ledger before the new version's point; a tracker that
fails never stops learning, and gets its point with the next version."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

from millrace.infra import telemetry
from millrace.infra.config import Settings
from millrace.infra.log.base import Bus
from millrace.infra.log.history import ledger
from millrace.schemas.records import LedgerEntry
from millrace.trainers.tracking.base import Tracker
from millrace.trainers.tracking.line import line as numbers
from millrace.trainers.tracking.services import open_trackers

_versions = telemetry.counter("millrace.learner.versions", "{version}", "versions committed")
_tokens = telemetry.counter("millrace.learner.tokens", "{token}", "tokens computed")
_groups = telemetry.counter("millrace.learner.groups", "{group}", "groups consumed, by outcome: trained or lost")
_step = telemetry.histogram("millrace.learner.step.time", "s", "time of a version, by phase")
_staleness = telemetry.histogram("millrace.learner.staleness", "{version}", "versions that trained tokens are behind")
_reward = telemetry.gauge("millrace.learner.reward", "", "mean sampled reward of the newest batch")
_ranks = telemetry.gauge("millrace.learner.ranks", "{rank}", "learners that trained the newest version")
_value = telemetry.gauge("millrace.learner.value", "", "newest value of each measure of the step, by name")


def measure(entry: LedgerEntry) -> None:
    """Record a version's numbers."""
    policy, metrics = entry["policy"], entry["metrics"]
    losses = sum(group["lost"] is not None for group in entry["groups"])
    _versions.add(1, policy=policy)
    _tokens.add(metrics.get("tokens_computed", 0.0), policy=policy)
    _groups.add(losses, policy=policy, outcome="lost")
    _groups.add(len(entry["groups"]) - losses, policy=policy, outcome="trained")
    _staleness.record(metrics.get("staleness_mean", 0.0), policy=policy)
    _reward.set(metrics.get("reward_mean", 0.0), policy=policy)
    _ranks.set(len(entry["ranks"]), policy=policy)
    for name, number in metrics.items():
        if name.startswith("timings_"):
            _step.record(number, policy=policy, phase=name.removeprefix("timings_"))
        else:
            _value.set(number, policy=policy, name=name)


def line(entry: LedgerEntry) -> str:
    """One line of progress for a committed version."""
    m = entry["metrics"]
    parts = [
        f"v{entry['version']}",
        numbers(m),
        f"oldest {m.get('staleness_max', 0.0):.0f} of {entry['eta']} versions",
        f"step {m.get('timings_step', 0.0):.2f} s",
        f"ranks {len(entry['ranks'])}",
    ]
    if m.get("spares"):
        parts.append(f"spares {m['spares']:.0f}")
    losses = sum(group["lost"] is not None for group in entry["groups"])
    if losses:
        parts.append(f"{losses} groups lost")
    if m.get("tokens_pulling", 1.0) == 0:
        parts.append("taught nothing: every advantage is 0, since rewards that are compared are equal")
    if entry["unchanged"]:
        parts.append(f"unchanged: {entry['unchanged']}")
    return "  ".join(parts)


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
