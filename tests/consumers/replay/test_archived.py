"""Versions are proven, trajectories selected and judged again from the archive as from the topics; what neither has is
refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from millrace.consumers import clearance
from millrace.consumers.replay import rejudge
from millrace.consumers.replay.prove.command import ReplayOptions, proving
from millrace.consumers.replay.rejudge import Replay
from millrace.consumers.replay.rejudge import sealed_rewards as every
from millrace.consumers.replay.selection import ModelLimits, Selector
from millrace.formats.exports.select import Selection
from millrace.infra.config import load
from millrace.infra.errors import HistoryGone
from millrace.infra.log.base import Bus
from millrace.infra.log.history.kinds import EVALUATIONS, TRAJECTORIES, Kind
from millrace.infra.log.history.reader import History
from millrace.infra.log.memory.bus import MemoryBus
from millrace.schemas.records import Trajectory
from millrace.streams.reward.judge import Judge
from tests.consumers.archived import cut
from tests.consumers.replay.test_reward import SECOND, Playing
from tests.support import forked
from tests.support.feed import feed
from tests.support.learners import Place
from tests.support.whole import NAMESPACE, POLICY, Whole, whole

SETTINGS = load(None, {"namespace": NAMESPACE, "policy.name": POLICY})
LEFT = "are neither in the topic nor in the archive; what is left begins at 2"


@pytest.fixture(scope="module")
def made() -> Whole:
    return whole(1)


def selector(bus: Bus, *, accept_gaps: bool = False) -> Selector:
    allowed = clearance.today(SETTINGS, "branch")
    return Selector(
        History(bus, NAMESPACE, POLICY), allowed, "local", ModelLimits(1 << 20, 1 << 20), accept_gaps=accept_gaps
    )


def without_two(made: Whole, kind: str) -> MemoryBus:
    """A copy of the log whose topic of this kind has lost two offsets of its first partition."""
    bus = made.copy().bus
    bus.delete_before(made.topic(kind), 0, 2)
    return bus


def judged(bus: Bus) -> tuple[list[str], object]:
    """What a replay over all of it judges, and what it comes to."""
    playing = Playing()
    past = History(bus, NAMESPACE, POLICY)
    report = asyncio.run(Replay(past, SECOND, Judge(playing, SECOND, POLICY)).run(bus, every(past, lambda _: True)))
    return playing.judged, report


def test_the_same_trajectories_are_selected_and_judged(made: Whole, tmp_path: Path) -> None:
    log = made.copy()
    selected, before = selector(log.bus).by_rule(lambda _: True), judged(log.copy().bus)
    both = cut(log.bus, NAMESPACE, tmp_path)
    past = History(both, NAMESPACE, POLICY)
    assert not [one for p in past.partitions(TRAJECTORIES) for one in log.bus.read(made.topic("trajectories"), p)]
    assert selected.candidates
    assert selector(both).by_rule(lambda _: True) == selected
    assert before[0]
    assert judged(both) == before


def test_a_rule_over_a_history_that_lost_a_part_says_what_is_left(made: Whole) -> None:
    bus, topic = without_two(made, "trajectories"), made.topic("trajectories")
    with pytest.raises(HistoryGone, match=rf"{topic}\[0\]: offsets 0 to 1 {LEFT}\. --what-is-left goes on with that"):
        selector(bus).by_rule(lambda _: True)
    found = selector(bus, accept_gaps=True).by_rule(lambda _: True)
    assert found.gaps == [f"{topic}[0]: offsets 0 to 1 {LEFT}"]
    assert 0 < len(found.candidates) < len(selector(made.bus).by_rule(lambda _: True).candidates)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "split"), [(TRAJECTORIES, "train"), (EVALUATIONS, "evaluation")])
def test_the_command_that_judges_again_refuses_what_its_split_has_lost(
    made: Whole, monkeypatch: pytest.MonkeyPatch, kind: Kind[Trajectory], split: str
) -> None:
    bus, topic = without_two(made, kind), made.topic(kind)

    @contextmanager
    def opened(_: object) -> Iterator[Bus]:
        yield bus

    monkeypatch.setattr(rejudge, "history", opened)

    def run(split: str, *, accept_gaps: bool) -> rejudge.RewardComparison:
        asked = rejudge.RejudgeRequest("trial-1", "exact", "v2", "second", 1, 10.0, accept_gaps)
        selection = Selection(evaluation=split == "evaluation", train=split == "train")
        return rejudge.run(SETTINGS, asked, selection, lambda *_: None)

    with pytest.raises(HistoryGone, match=rf"{topic}\[0\]: offsets 0 to 1 {LEFT}"):
        run(split, accept_gaps=False)
    other = run("train" if split == "evaluation" else "evaluation", accept_gaps=False)
    assert other.verdicts > 0, "the topic of the other split is whole"
    report = run(split, accept_gaps=True)
    assert report.trajectories == sum(1 for _ in History(bus, NAMESPACE, POLICY).rows(kind))
    assert f"without {topic}[0]: offsets 0 to 1 {LEFT}" in rejudge.lines(report)


@pytest.mark.slow
def test_versions_are_proven_from_the_archive_alone(place: Callable[..., Place], tmp_path: Path) -> None:
    it = place(**{"learner.keep": 1})
    feed(it.bus, it.settings, range(12))
    it.learn(3)

    def prove(bus: Bus) -> list[tuple[int, str, str]]:
        with proving(it.settings, bus, ReplayOptions("all"), forked.server()) as (_, outcomes):
            return [(one.version, one.word, one.digest) for one in outcomes]

    before = prove(it.bus)
    assert [(version, word) for version, word, _ in before] == [(1, "equal"), (2, "equal"), (3, "equal")]
    both = cut(it.bus, it.settings.namespace, tmp_path / "archive")
    assert prove(both) == before
