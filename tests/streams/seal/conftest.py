"""Seal behind a refine of its own: tests write what a gateway writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from millrace.infra.stages.base import Emit
from millrace.schemas.chain import START
from millrace.streams.seal.group_outcome import ClosingRules
from millrace.streams.seal.stage import Seal
from millrace.testing.events import Episode
from tests.support.folding import Bench, of

NOW = 1_700_000_000_000_000
SECOND = 1_000_000
GOVERNED = {
    "eligibility": "aggregate",
    "reason": "tenant:local",
    "classification": "internal",
    "redaction": "none_needed",
    "redaction_version": "",
    "policy_version": "",
    "counts": {},
    "findings": [],
    "retention_until": None,
    "residency": None,
}


class Sealed:
    """One slot of seal. `now` is the log time of the next event."""

    def __init__(self, rules: ClosingRules | None = None, policies: tuple[str, ...] = ("p",)) -> None:
        self.bench = Bench(Seal(policies, rules))
        self.now = NOW

    def feed(self, episode: Episode, *events: Mapping[str, Any], **governance: Any) -> list[Emit]:
        out: list[Emit] = []
        for event in events:
            governed = {
                **event,
                "log_time": self.now,
                "governance": {**GOVERNED, **governance},
                "source_hash": event["hash"],
                "prev_hash": START,
            }
            out += self.bench.record("events", episode.key, "Event", governed)
        return out

    def run(
        self, episode: Episode, *, reward: float | None = 1.0, calls: int = 1, status: str = "completed"
    ) -> list[Emit]:
        """A whole attempt; without a reward its judge stays silent."""
        events = [episode.start(), *(episode.call(f"{episode.root}-{n}", keep=5 * n) for n in range(calls))]
        out = self.feed(episode, *events, episode.end(status))
        return out + (self.feed(episode, episode.reward(reward)) if reward is not None else [])

    def tick(self, seconds: float = 1.0) -> list[Emit]:
        """Log time passes."""
        self.now += int(seconds * SECOND)
        progress = {"stage": "refine", "slot": 0, "time": self.now}
        return self.bench.record("events", "progress/0", "Progress", progress)

    def reasons(self, emits: Iterable[Emit] | None = None) -> list[str]:
        """Codes of the dead letters."""
        return [letter["reason"] for letter in of(self.bench.emits if emits is None else emits, "DeadLetter")]


@pytest.fixture
def seal():
    return Sealed


def group(size: int, ticket: int = 7, **fields: Any) -> list[Episode]:
    """One attempt for each sample of a ticket."""
    return [
        Episode(f"t{ticket}-{n}", ticket=ticket, size=size, sample=n, source=f"gateway-{n}", **fields)
        for n in range(size)
    ]


@pytest.fixture(name="group")
def _group():
    return group
