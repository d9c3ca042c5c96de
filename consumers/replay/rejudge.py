"""`millrace replay reward`: a verifier judges again what has ended, in events beside the live rewards.

    trajectories, evaluations (which) -> events (how each ended) -> verifier -> raw, marked with the replay's name

Invariants: a reward of a replay counts for no sample and changes none; each trajectory gets one reward for a replay,
source and rubric, however often the replay is killed and begun again, because what the log already holds is left out
after whoever wrote it before is fenced; nothing is judged that was not sealed."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from millrace.consumers import clearance
from millrace.consumers.replay.selection import Selector
from millrace.consumers.replay.sql_selection import question
from millrace.formats.exports.select import Selection
from millrace.infra import faults
from millrace.infra.config import Settings
from millrace.infra.connect import claims, history
from millrace.infra.log.base import Bus, Outgoing, Record
from millrace.infra.log.history.gaps import check_whole
from millrace.infra.log.history.kinds import EVALUATIONS, EVENTS, RAW, TRAJECTORIES, Kind
from millrace.infra.log.history.reader import History
from millrace.infra.log.topics import full_name
from millrace.schemas import codec
from millrace.schemas.errors import SchemaError
from millrace.schemas.records import Reward, Trajectory
from millrace.streams.reward.choose import choose, conversations, independent
from millrace.streams.reward.judge import Evaluator, Judge, reward_id

AT_ONCE = 64
"""episodes judged together, and written in one transaction"""
Rule = Callable[[Trajectory], bool]
SealedRewards = Mapping[tuple[str, str], float | None]
"""the sealed reward of trajectories, by id and attempt"""


class RejudgeRequest(NamedTuple):
    """Who judges again. name: of the replay; one that was killed goes on under its name; accept_gaps: a
    history that has lost a part is judged as far as it is there."""

    name: str
    verifier: str
    rubric: str
    source: str
    workers: int
    timeout_s: float
    accept_gaps: bool = False


def run(
    settings: Settings, request: RejudgeRequest, selection: Selection, watch: Callable[[int, int], None], sql: str = ""
) -> RewardComparison:
    """Judge what is selected of the configured policy's history, and by a query too where one is given. Raises
    RewardError where there is no such verifier, HistoryGone where a part of the history is nowhere, FencedError
    when another process runs the same replay, WarehouseError where the query cannot be asked."""

    def is_selected(trajectory: Trajectory) -> bool:
        return selection.leaves_out(trajectory, None) is None

    ask = question(settings, sql, is_selected) if sql else None
    reward, store = settings.reward, claims(settings)
    verifier = choose(reward, request.verifier, workers=request.workers, timeout_s=request.timeout_s)
    apart = independent(reward, request.verifier)
    evaluator = Evaluator(request.source, verifier.version, request.rubric, request.name, independent=apart)
    try:
        with history(settings) as bus:
            events = full_name(settings.namespace, "events")
            key, read = reward.key.get_secret_value(), conversations(verifier, bus, events, store)
            judge = Judge(verifier, evaluator, settings.policy.name, store, key=key, conversations=read)
            past = History(bus, settings.namespace, settings.policy.name, store.resolve)
            if ask is None:
                kinds = [*([TRAJECTORIES] if selection.train else []), *([EVALUATIONS] if selection.evaluation else [])]
                missing = check_whole(past, *kinds, accepts_gaps=request.accept_gaps)
                report = asyncio.run(
                    Replay(past, evaluator, judge, watch).run(bus, sealed_rewards(past, is_selected, kinds))
                )
                report.missing = missing
                return report
            answer = ask(Selector(past, clearance.today(settings), settings.policy.tenant, None))
            rewards = {(one.id, one.attempt): one.reward for one in answer.candidates}
            report = asyncio.run(Replay(past, evaluator, judge, watch).run(bus, rewards))
            report.left_out = +answer.left_out
            return report
    finally:
        verifier.close()


def lines(report: RewardComparison) -> list[str]:
    """What a replay came to, a sentence a line."""
    out = [f"{report.verdicts} of {report.trajectories} trajectories judged"]
    out += [f"without {gap}" for gap in report.missing]
    out += [f"left out {count}: {reason}" for reason, count in report.left_out.most_common()]
    if report.repeats:
        out.append(f"{report.repeats} had been judged by this replay before")
    if report.failures:
        out.append(f"{report.failures} verdicts failed: their rewards say how")
    if report.absences:
        out.append(f"{report.absences} have no end in the log any more: nothing is left to judge")
    if report.pairs:
        old_mean, new_mean = report.old_sum / report.pairs, report.new_sum / report.pairs
        out.append(
            f"mean reward {old_mean:.3f} when sealed, {new_mean:.3f} now, over {report.pairs}; {report.changes} differ"
        )
    return out


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
    """Judges the trajectories of one policy again. `watch` hears how many of how many are done."""

    def __init__(
        self,
        history: History,
        evaluator: Evaluator,
        judge: Callable[[Record], Awaitable[Outgoing | None]],
        watch: Callable[[int, int], None] = lambda *_: None,
    ) -> None:
        """judge: a `Judge` of this evaluator. Raises ValueError for an evaluator that is no replay's."""
        if not evaluator.replay:
            raise ValueError("an evaluator over history says which replay it is")
        self._history = history
        self._evaluator = evaluator
        self._judge = judge
        self._watch = watch

    async def run(self, bus: Bus, attempts: SealedRewards) -> RewardComparison:
        """Judge what of these is not yet judged. Raises FencedError when another run of this replay begins."""
        report = RewardComparison()
        report.trajectories = len(attempts)
        with bus.transactor(self._owner()) as transactor:
            reward_ids = self._reward_ids()
            rest = {key: one for key, one in attempts.items() if reward_id(key[0], self._evaluator) not in reward_ids}
            report.repeats = len(attempts) - len(rest)
            before = {trajectory: value for (trajectory, _), value in rest.items()}
            ends = self._ends(rest)
            while batch := list(islice(ends, AT_ONCE)):
                answers = [out for out in await asyncio.gather(*map(self._judge, batch)) if out is not None]
                faults.point("replay.judged")
                transactor.begin()
                for out in answers:
                    transactor.send(out, wants_place=False)
                faults.point("replay.sent")
                transactor.commit({}, None)
                faults.point("replay.committed")
                for out in answers:
                    trajectory, reward = self._read(out)
                    report.add(before[trajectory], reward)
                self._watch(report.verdicts, len(rest))
        report.absences = len(rest) - report.verdicts
        return report

    def _owner(self) -> str:
        history, by = self._history, self._evaluator
        return full_name(history.namespace, f"{history.policy}.replay-{by.replay}-{by.source}-{by.rubric}")

    def _reward_ids(self) -> set[str]:
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
