"""Rewards over history: a verifier judges again what has ended, in events beside the live rewards.

    trajectories, evaluations (which) -> events (how each ended) -> verifier -> raw, marked with the replay's name

Invariants: a reward of a replay counts for no sample and changes none; each trajectory gets one reward for a replay,
source and rubric, however often the replay is killed and begun again, because what the log already holds is left out
after whoever wrote it before is fenced; nothing is judged that was not sealed.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice

from millrace.infra import faults
from millrace.infra.log.base import Bus, Outgoing, Record
from millrace.infra.log.history.kinds import EVALUATIONS, EVENTS, RAW, TRAJECTORIES, Kind
from millrace.infra.log.history.reader import History
from millrace.infra.log.topics import full_name
from millrace.schemas import codec
from millrace.schemas.errors import SchemaError
from millrace.schemas.records import Reward, Trajectory
from millrace.streams.reward.judge import Evaluator, reward_id

AT_ONCE = 64
"""episodes judged together, and written in one transaction"""

Rule = Callable[[Trajectory], bool]
SealedRewards = Mapping[tuple[str, str], float | None]
"""the sealed reward of trajectories, by id and attempt"""


@dataclass(slots=True)
class RewardComparison:
    """What a replay came to. old_sum, new_sum: sums of the sealed rewards and of the new ones over the
    trajectories that have both; changes: of those, how many differ; left_out: what was asked for and may not be judged,
    by reason; missing: ranges that nobody has any more, so that nothing of them was asked for."""

    trajectories: int = 0
    repeats: int = 0
    verdicts: int = 0
    failures: int = 0
    absences: int = 0
    pairs: int = 0
    old_sum: float = 0.0
    new_sum: float = 0.0
    changes: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    missing: list[str] = field(default_factory=list)

    def add(self, before: float | None, reward: Reward) -> None:
        """One more verdict, of a trajectory that was sealed with the reward `before`."""
        self.verdicts += 1
        value = reward["value"]
        if reward["failure"] is not None or value is None:
            self.failures += 1
        elif before is not None:
            self.pairs += 1
            self.old_sum += before
            self.new_sum += value
            self.changes += not math.isclose(before, value, rel_tol=1e-9, abs_tol=1e-12)


def sealed_rewards(
    history: History, rule: Rule, kinds: Sequence[Kind[Trajectory]] = (TRAJECTORIES, EVALUATIONS)
) -> SealedRewards:
    """Every trajectory of these kinds that is wanted."""
    rows = (row for kind in kinds for row in history.rows(kind))
    return {(row["id"], row["attempt"]): row["reward"] for row in rows if rule(row.record)}


class Replay:
    """Judges the trajectories of one policy again. `told` hears how many of how many are done."""

    def __init__(
        self,
        history: History,
        evaluator: Evaluator,
        judge: Callable[[Record], Awaitable[Outgoing | None]],
        told: Callable[[int, int], None] = lambda *_: None,
    ) -> None:
        """judge: a `Judge` of this evaluator. Raises ValueError for an evaluator that is no replay's."""
        if not evaluator.replay:
            raise ValueError("an evaluator over history says which replay it is")
        self._history = history
        self._evaluator = evaluator
        self._judge = judge
        self._told = told

    async def run(self, bus: Bus, attempts: SealedRewards) -> RewardComparison:
        """Judge what of these is not yet judged. Raises FencedError when another run of this replay begins."""
        report = RewardComparison()
        report.trajectories = len(attempts)
        with bus.transactor(self._owner()) as transactor:
            reward_ids = self._done()
            rest = {key: one for key, one in attempts.items() if reward_id(key[0], self._evaluator) not in reward_ids}
            report.repeats = len(attempts) - len(rest)
            before = {trajectory: value for (trajectory, _), value in rest.items()}
            ends = self._ends(rest)
            while batch := list(islice(ends, AT_ONCE)):
                answers = [out for out in await asyncio.gather(*map(self._judge, batch)) if out is not None]
                faults.point("replay.judged")
                transactor.begin()
                for out in answers:
                    transactor.send(out, placed=False)
                faults.point("replay.sent")
                transactor.commit({}, None)
                faults.point("replay.committed")
                for out in answers:
                    trajectory, reward = self._read(out)
                    report.add(before[trajectory], reward)
                self._told(report.verdicts, len(rest))
        report.absences = len(rest) - report.verdicts
        return report

    def _owner(self) -> str:
        history, by = self._history, self._evaluator
        return full_name(history.namespace, f"{history.policy}.replay-{by.replay}-{by.source}-{by.rubric}")

    def _done(self) -> set[str]:
        """Ids of the rewards of this replay that the log holds, admitted or not yet."""
        reward_ids = set[str]()
        source = self._evaluator.source.encode()
        for kind in (RAW, EVENTS):
            rows = self._history.rows(
                kind, only=lambda r: r.headers.get("kind") == b"reward" and r.headers.get("source") == source
            )
            for row in rows:
                if row.name == "Event" and row.record["kind"] == "reward" and row.record["body_encoding"] == "plain":
                    with suppress(SchemaError):  # a dead letter says so
                        reward: Reward = row.body
                        if reward["replay"] == self._evaluator.replay:
                            reward_ids.add(reward["reward_id"])
        return reward_ids

    def _ends(self, attempts: Iterable[tuple[str, str]]) -> Iterator[Record]:
        """The records that say how these attempts ended."""
        attempt_of = dict(iter(attempts))  # of pairs, not a copy of what maps them
        for row in self._history.rows(EVENTS, own=True, only=lambda r: r.headers.get("kind") == b"episode_ended"):
            if row.name == "Event" and attempt_of.get(row.record["trajectory"]) == row.record["attempt"]:
                del attempt_of[row.record["trajectory"]]
                yield row.raw

    def _read(self, out: Outgoing) -> tuple[str, Reward]:
        """The trajectory and the reward of what was written, which may be a claim."""
        lying = Record(out.topic, 0, 0, out.key, out.value, out.headers, 0)
        event = codec.decode_as("Event", self._history.resolve(lying).value or b"")
        reward: Reward = codec.decode_body("reward", event["body"])
        return event["trajectory"], reward
