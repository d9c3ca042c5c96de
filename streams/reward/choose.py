"""What judges: a verifier by its name in the settings.

Invariant: every name is of exactly one kind, and what is missing for it is said before anything is judged."""

from __future__ import annotations

from typing import Protocol

from millrace.infra.config import Reward
from millrace.infra.log.base import Bus
from millrace.infra.log.blobs import ClaimStore
from millrace.schemas.json_values import JsonObject
from millrace.streams.reward.asking import AskedJudge
from millrace.streams.reward.conversation import Conversations
from millrace.streams.reward.pool import Pool, Verdict
from millrace.streams.reward.running import UnitTests

JUDGE, TESTS = "judge", "tests"
SETTINGS_VERIFIERS = (JUDGE, TESTS)
"""verifiers whose work is described in the settings"""


class ChosenVerifier(Protocol):
    """A verifier at work."""

    @property
    def version(self) -> str:
        """What names it in `Reward.source_version`."""

    async def judge(self, task: str, output: str, episode: JsonObject) -> Verdict:
        """The verdict on an output; `task` is JSON text. Never raises for what a verifier does."""

    def close(self) -> None:
        """Let go of what it holds."""


def choose(
    reward: Reward, verifier: str = "", *, workers: int | None = None, timeout_s: float | None = None
) -> ChosenVerifier:
    """The verifier of these settings, or another of that name. Raises RewardError when there is none, or when what it
    needs is not set."""
    name, seconds = verifier or reward.verifier, timeout_s or reward.timeout_s
    if name == JUDGE:
        return AskedJudge(reward.judge, seconds)
    if name == TESTS:
        return UnitTests(reward.tests, workers=workers or reward.workers, timeout_s=seconds)
    return Pool(name, workers=workers or reward.workers, timeout_s=seconds)


def conversations(verifier: ChosenVerifier, bus: Bus, events: str, claims: ClaimStore | None) -> Conversations | None:
    """Where a verifier looks up what was said in an episode, in the topic `events`; None for one that does not."""
    if not isinstance(verifier, AskedJudge) or not verifier.reads:
        return None
    return Conversations(bus, events, claims, verifier.reads)


def independent(reward: Reward, verifier: str = "") -> bool:
    """Whether a verifier is apart from the policy that it judges."""
    return (verifier or reward.verifier) != JUDGE or reward.judge.independent
