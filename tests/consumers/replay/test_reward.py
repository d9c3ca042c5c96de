"""A verifier over history, through the production stages: every reward once, beside the live ones, changing none."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from millrace.consumers.replay.rejudge import Replay, RewardComparison
from millrace.consumers.replay.rejudge import sealed_rewards as every
from millrace.infra import faults
from millrace.infra.errors import FencedError
from millrace.infra.log.history.kinds import EVALUATIONS, EVENTS, TRAJECTORIES
from millrace.infra.log.history.reader import History
from millrace.schemas.records import Reward
from millrace.streams.reward.conversation import Conversations
from millrace.streams.reward.judge import Evaluator, Judge, reward_id
from millrace.streams.reward.pool import Verdict
from millrace.testing.world import World
from tests.support.fault_points import fault_points
from tests.support.whole import NAMESPACE, POLICY, Whole, whole

SECOND = Evaluator("second", "tests:second", "v2", "trial-1")


class Playing:
    """Judges by the length of what was said; fails where an episode's id ends so."""

    def __init__(self) -> None:
        self.judged: list[str] = []

    async def judge(self, task: str, output: str, episode: dict[str, Any]) -> Verdict:
        self.judged.append(episode["trajectory"])
        if episode["trajectory"].endswith("3"):
            return Verdict(None, {}, None, None, "timeout")
        return Verdict(len(output) / 100, {"length": float(len(output))}, None, "why", None)


def again(
    world: World | Whole, wanted: Callable[[Any], bool] = lambda _: True, who: Evaluator = SECOND
) -> RewardComparison:
    """Judge what is wanted again."""
    judge = Judge(Playing(), who, POLICY)
    past = History(world.bus, NAMESPACE, POLICY)
    return asyncio.run(Replay(past, who, judge).run(world.bus, every(past, wanted)))


def rewards(made: Whole) -> list[tuple[str, Reward]]:
    """Trajectory and body of every reward of a replay that was admitted."""
    rows = History(made.bus, NAMESPACE, POLICY).rows(EVENTS, only=lambda r: r.headers.get("kind") == b"reward")
    found = [(row["trajectory"], row.body) for row in rows]
    return [(trajectory, body) for trajectory, body in found if body["replay"] == SECOND.replay]


def sealed_rewards(made: Whole | World) -> dict[str, float | None]:
    past = History(made.bus, NAMESPACE, POLICY)
    return {row["id"]: row["reward"] for kind in (TRAJECTORIES, EVALUATIONS) for row in past.rows(kind)}


class Reading(Playing):
    """Keeps what it was given of each episode's conversation."""

    def __init__(self) -> None:
        super().__init__()
        self.read: dict[str, str | None] = {}

    async def judge(self, task: str, output: str, episode: dict[str, Any]) -> Verdict:
        self.read[episode["trajectory"]] = episode["conversation"]
        return await super().judge(task, output, episode)


def test_a_judge_reads_what_governance_left_of_each_conversation() -> None:
    """Behind the production stages, whatever else lies between the calls of an episode."""
    reading, calls, broken = Reading(), dict[str, list[str]](), set[str]()

    def later(world: World) -> None:
        world.drain()
        past = History(world.bus, NAMESPACE, POLICY)
        for row in past.rows(
            EVENTS, only=lambda record: record.headers.get("kind") in (b"model_call", b"episode_ended")
        ):
            if row["kind"] == "model_call":
                calls.setdefault(row["trajectory"], []).append(row.body["response"].decode())
            if row["kind"] == "episode_ended" and not row.body["whole"]:
                broken.add(row["trajectory"])
        read = Conversations(world.bus, f"{NAMESPACE}.events", None, 1 << 20)
        judge = Judge(reading, SECOND, POLICY, conversations=read)
        asyncio.run(Replay(past, SECOND, judge).run(world.bus, every(past, lambda _: True)))

    whole(1, later=later)
    assert any(reading.read.values())
    for trajectory, found in reading.read.items():
        made = calls.get(trajectory)
        if found is None:
            assert trajectory in broken or not made
            continue
        shown = [call["response"] for call in json.loads(found)["calls"]]
        assert shown == [json.loads(response) for response in made or ()]


@pytest.mark.parametrize("seed", range(3))
def test_history_is_judged_again_and_stays_what_it_was(seed: int) -> None:
    reports, before = list[RewardComparison](), dict[str, float | None]()

    def later(world: World) -> None:
        world.drain()
        before.update(sealed_rewards(world))
        reports.append(again(world))
        reports.append(again(world))
        world.drain()
        reports.append(again(world))
        world.drain()

    made = whole(seed, later=later)
    first, *others = reports
    assert first.verdicts + first.absences == first.trajectories == len(before)
    assert first.verdicts > 0
    assert all((one.verdicts, one.repeats, one.absences) == (0, first.verdicts, first.absences) for one in others)
    found = rewards(made)
    assert sorted(trajectory for trajectory, _ in found) == sorted({trajectory for trajectory, _ in found})
    assert {trajectory for trajectory, _ in found} <= before.keys()
    assert len(found) == first.verdicts
    assert all(body["reward_id"] == reward_id(trajectory, SECOND) for trajectory, body in found)
    assert sealed_rewards(made) == before, "no sample changed"
    report = made.audit()
    assert report.clean, report.violations[:3]
    counted = [
        body["value"] for trajectory, body in found if body["value"] is not None and before[trajectory] is not None
    ]
    assert (first.pairs, pytest.approx(first.new_sum)) == (len(counted), sum(counted))
    assert first.failures == sum(body["failure"] is not None for _, body in found)


def test_only_what_is_wanted_is_judged() -> None:
    reports, some = list[RewardComparison](), set[str]()

    def later(world: World) -> None:
        some.update(random.Random(0).sample(sorted(sealed_rewards(world)), 3))
        reports.append(again(world, lambda trajectory: trajectory["id"] in some))
        world.drain()

    made = whole(1, later=later)
    assert reports[0].trajectories == 3
    assert {trajectory for trajectory, _ in rewards(made)} <= some


@pytest.mark.parametrize("split", ["train", "evaluation"])
def test_each_split_is_judged_when_it_is_asked_for(split: str) -> None:
    reports = list[RewardComparison]()

    def later(world: World) -> None:
        world.drain()
        reports.append(again(world, lambda trajectory: trajectory["split"] == split))
        world.drain()

    made = whole(2, later=later)
    kind = TRAJECTORIES if split == "train" else EVALUATIONS
    asked = {row["id"] for row in History(made.bus, NAMESPACE, POLICY).rows(kind)}
    judged = {trajectory for trajectory, _ in rewards(made)}
    assert 0 < len(judged) == reports[0].verdicts
    assert judged <= asked
    assert made.audit().clean


@pytest.mark.parametrize("point", [name for name in fault_points("consumers") if name.startswith("replay.")])
def test_a_replay_that_dies_anywhere_is_begun_again(point: str) -> None:
    """What a dead one left in doubt is settled by the next, which judges the rest."""

    class Died(BaseException):
        pass

    def later(world: World) -> None:
        def hook(name: str) -> None:
            if name == point:
                raise Died

        before = faults.install(hook)
        try:
            with pytest.raises(Died):
                again(world)
        finally:
            faults.install(before)
        again(world)
        world.drain()

    made = whole(2, later=later)
    found = [trajectory for trajectory, _ in rewards(made)]
    assert len(found) == len(set(found)) > 0
    assert made.audit().clean


def test_a_second_run_of_the_same_replay_fences_the_first() -> None:
    def later(world: World) -> None:
        def hook(name: str) -> None:
            if name == "replay.judged":
                faults.install(None)
                with ThreadPoolExecutor(1) as other:
                    other.submit(again, world).result()

        before = faults.install(hook)
        try:
            with pytest.raises(FencedError):
                again(world)
        finally:
            faults.install(before)
        world.drain()

    found = [trajectory for trajectory, _ in rewards(whole(0, later=later))]
    assert len(found) == len(set(found)) > 0


def test_an_evaluator_that_is_no_replay_is_refused() -> None:
    made = whole(0, 20)
    with pytest.raises(ValueError, match="which replay"):
        again(made, who=Evaluator("second", "x", "v2"))
