"""The reloader's decisions, pure: what to do next with one engine, from events, looks at the engine and outcomes.

Invariants:

- Only the newest version is loaded; what came in between is skipped. One incarnation never goes back below a
  version it has acknowledged.
- A fresh reloader trusts no label that it finds: it loads the newest version once. So whatever a killed predecessor
  left (paused, half loaded, loaded and not acknowledged) ends the same way.
- After a failed load nothing is sampled before a load has succeeded: first a newer version if there is one, else
  the last good one. Two failures in a row condemn the incarnation: an engine may then answer 200 to a good load and
  serve wrong numbers (measured), so only a restart helps.
- What failed is tried again later, with growing delays, as long as it is the newest."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from millrace.infra.engines.control import EngineState
from millrace.schemas import bounds
from millrace.schemas.labels import parse_label
from millrace.schemas.records import WeightVersion

_DIGEST = re.compile(r"[0-9A-Za-z_-]*")
_NAME = re.compile(r"[^/\\\x00-\x1f][^\\\x00-\x1f]*")
"""relative to the directory, with no way out of it"""
DELAY_S = 1.0
MOST_S = 60.0


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing to do now."""


@dataclass(frozen=True, slots=True)
class Swap:
    """Check this version, and put it into the engine."""

    version: int


@dataclass(frozen=True, slots=True)
class Condemn:
    """Restart the engine: it cannot be trusted any more."""


Action = Idle | Swap | Condemn


@dataclass(slots=True)
class _Trouble:
    """Why a version was refused, how often, and when it may be tried again (monotonic seconds)."""

    reason: str
    times: int
    again_at: float


@dataclass(slots=True)
class ReloaderState:
    """The state of one reloader. `served` is the version that the present incarnation was last seen to serve; it is
    `clean` when this reloader put it there and nothing has touched it since, `is_trusted` also when a label said so."""

    policy: str
    events: dict[int, WeightVersion] = field(default_factory=dict)
    incarnation: str | None = None
    served: int | None = None
    clean: bool = False
    is_trusted: bool = False
    failures: int = 0
    broke: int = -1
    is_condemned: bool = False
    trouble: dict[int, _Trouble] = field(default_factory=dict)

    # ------------------------------------------------------------------ facts

    def learn(self, event: WeightVersion) -> None:
        """A version exists. `fault_of` says first whether its event makes sense."""
        self.events[event["version"]] = event

    def see(self, state: EngineState) -> bool:
        """The engine answered. True when it is another incarnation than before, or the first."""
        if state.incarnation == self.incarnation:
            if self.is_trusted and (state.paused or not self._is_served(state.label)):
                self.clean = self.is_trusted = False  # somebody else touched it
            return False
        self.incarnation = state.incarnation
        label = parse_label(state.label)
        intact = label is not None and label[0] == self.policy and not state.paused
        self.served = label[1] if label is not None and intact and label[1] in self.events else None
        self.clean = False
        self.is_trusted = self.served is not None
        self.failures = 0
        self.is_condemned = False
        return True

    def note_load(self, version: int) -> None:
        """The engine serves this version: loaded, cache reset, label set."""
        self.served = version
        self.clean = self.is_trusted = True
        self.failures = 0
        self.trouble.pop(version, None)

    def unfit(self, version: int, reason: str, now: float) -> None:
        """The directory did not pass its checks; the engine was not touched."""
        self._blame(version, reason, now)

    def note_failure(self, version: int, reason: str, now: float) -> None:
        """The engine was paused and did not load it: its weights are undefined."""
        self.clean = self.is_trusted = False
        self.failures += 1
        self.broke = version
        self.is_condemned = self.failures >= 2
        self._blame(version, reason, now)

    # ------------------------------------------------------------------ decision

    def next(self, now: float) -> Action:
        """What to do at `now` (monotonic seconds)."""
        if self.incarnation is None or not self.events:
            return Idle()
        if self.is_condemned:
            return Condemn()
        for version in self._candidates():
            if version == self.served and self.clean:
                return Idle()
            trouble = self.trouble.get(version)
            if trouble is None or trouble.again_at <= now:
                return Swap(version)
        return Idle()

    @property
    def error(self) -> str | None:
        """Why the newest version is not served, where it was tried."""
        version = max(self.trouble, default=-1)
        is_open = self.served is None or version > self.served or not self.is_trusted
        return f"version {version}: {self.trouble[version].reason}" if self.trouble and is_open else None

    @property
    def newest(self) -> int | None:
        """The newest version that exists."""
        return max(self.events, default=None)

    def _candidates(self) -> list[int]:
        floor = self.served if self.served is not None else min(self.events)
        versions = sorted((version for version in self.events if version >= floor), reverse=True)
        if self.failures and self.served is not None:
            # the weights are undefined: rather the last good version than one that was never tried
            versions = [v for v in versions if v > self.broke] + [self.served]
            versions += [v for v in sorted(self.events, reverse=True) if floor < v <= self.broke]
        return versions

    def _is_served(self, label: str) -> bool:
        return parse_label(label) == (self.policy, self.served)

    def _blame(self, version: int, reason: str, now: float) -> None:
        before = self.trouble.get(version)
        times = before.times + 1 if before else 1
        delay = min(MOST_S, DELAY_S * 2 ** (times - 1))
        self.trouble[version] = _Trouble(reason, times, now + delay)


def fault_of(event: WeightVersion, policy: str) -> str | None:
    """Why nothing may be loaded by an event, None when it may be tried: what it names becomes names on a disk."""
    version, parent = event["version"], event["parent"]
    if event["policy"] != policy:
        return "it is of another policy"
    if not 0 <= version <= bounds.VERSION:
        return "its version is out of bounds"
    branch = version == 0 and event["parent_policy"] is not None
    if parent is not None and not 0 <= parent < (bounds.VERSION if branch else version):
        return "its parent is no earlier version"
    if branch and event["mode"] == "delta":
        return "its parent is of another policy, whose weights are not here"
    if not _DIGEST.fullmatch(event["digest"]):
        return "its digest is none"
    if not all(_NAME.fullmatch(name) and ".." not in name.split("/") for name in event["files"]):
        return "it names files outside its directory"
    return None
