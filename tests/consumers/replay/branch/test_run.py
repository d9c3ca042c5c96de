"""Branches of a small real history: what they learn, what they announce, and that a death anywhere changes nothing."""

from __future__ import annotations

import os
import shutil
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from millrace.consumers import policy_names
from millrace.consumers.audit import audit
from millrace.consumers.replay.branch import selection_file
from millrace.consumers.replay.branch.command import BranchScreen
from millrace.consumers.replay.branch.guard import Reach
from millrace.consumers.replay.branch.items import LOWEST
from millrace.consumers.replay.branch.job import BranchOptions
from millrace.consumers.replay.selection import SelectionResult, Selector
from millrace.infra import faults
from millrace.infra.errors import BranchError, PolicyError
from millrace.infra.log.history import newest
from millrace.infra.log.history.kinds import TRAJECTORIES
from millrace.infra.log.history.reader import History
from millrace.infra.terminal import Terminal
from millrace.infra.versions import PIN
from millrace.trainers.weights import checkpoint
from tests.consumers.replay.branch.judged import judge
from tests.support.branches import Heard, accuracy, branch, events, play, train_on, violations
from tests.support.fault_points import fault_points
from tests.support.learners import Place

pytestmark = pytest.mark.slow

POINTS = [name for name in fault_points("consumers") if name.startswith("branch.")]
SHORT = {"steps": 5, "save_every": 2, "lr": 3e-4}


class Died(BaseException):
    """A process that is gone."""


def ends(place: Place, name: str = "b") -> list[tuple[int, str]]:
    return [(event["version"], event["digest"]) for event in events(place.bus, place.settings, name)]


def test_imitating_the_best_of_each_group_beats_the_start_on_held_out_tasks(place: Place) -> None:
    first = events(place.bus, place.settings, "pico")[0]
    start = accuracy(Path(first["uri"]))
    last, heard = branch(place.bus, place.settings, epochs=6, lr=3e-4, save_every=20)
    assert 0 < heard.items < 400
    assert heard.left_out[LOWEST] > 0, "of groups that failed as a whole nothing is imitated"
    assert heard.reach is None, "imitation needs no ratio"
    assert accuracy(Path(last["uri"])) > start + 0.1
    assert violations(place.bus, place.settings) == []
    zero, *others = events(place.bus, place.settings)
    assert (zero["parent_policy"], zero["parent"], zero["selection"]) == ("pico", 0, None)
    assert zero["tokenizer_hash"] == first["tokenizer_hash"]
    theirs, ours = (checkpoint.read(Path(event["uri"])).weights for event in (first, zero))
    assert all(bool((ours[name] == theirs[name]).all()) for name in theirs)
    assert {(event["selection"], event["selection_places"]) for event in others} == {("all", heard.items)}
    assert len({event["selection_digest"] for event in others}) == 1


@pytest.mark.parametrize(
    "method", ["awr", "grpo", "rloo", "decoupled", "tis", "icepop", "m2po", "dpo", "ipo", "simpo", "orpo"]
)
def test_every_method_learns_from_the_same_history(method: str, place: Place) -> None:
    last, heard = branch(place.bus, place.settings, method=method, steps=3, save_every=3)
    assert (heard.reach is None) == (method in ("awr", "dpo", "ipo", "simpo", "orpo"))
    if heard.reach is not None:
        assert heard.reach.sequence_ess > 0.99, "it begins with the weights that sampled"
    names = {name: f"t.b.{name}" for name in ("weights", "ledger")}
    head = newest.head(place.bus, names["weights"], names["ledger"])
    assert head is not None
    assert (head.version, head.entry["unchanged"], head.entry["metrics"]["steps"] > 0) == (1, None, True)
    assert last["digest"] != events(place.bus, place.settings)[0]["digest"]
    assert violations(place.bus, place.settings) == []


class Loud(Heard):
    """Hears, and prints what the command prints of the guard."""

    def __init__(self) -> None:
        super().__init__()
        self.said = StringIO()
        self._screen = BranchScreen(Terminal(file=self.said, width=200), BranchOptions("b"))

    def on_reach(self, reach: Reach) -> None:
        super().on_reach(reach)
        self._screen.on_reach(reach)


def test_the_guard_warns_and_refuses_by_what_it_scores_from_the_starting_weights(place: Place) -> None:
    """The samples are version 0's, and versions 1 and 2 are moved away from it at random."""
    near, far = (train_on(place.bus, place.settings, noise)["version"] for noise in (0.3, 0.4))
    heard = [Loud() for _ in range(4)]
    grpo = {"method": "grpo", "steps": 1}
    branch(place.bus, place.settings, "near", version=near, heard=heard[0], **grpo)
    with pytest.raises(BranchError, match=r"too far from the starting weights: 0\.0\d+ .*or say --anyway"):
        branch(place.bus, place.settings, "far", version=far, heard=heard[1], accept_gaps=True, **grpo)
    assert not [name for name in place.bus.topics("t.") if ".far." in name], "nothing is announced"
    assert events(place.bus, place.settings, "near")[-1]["version"] == 1
    last, _ = branch(place.bus, place.settings, "far", version=far, anyway=True, heard=heard[2], **grpo)
    assert (last["version"], violations(place.bus, place.settings, "far")) == (1, [])
    branch(place.bus, place.settings, "imitates", version=far, steps=1, heard=heard[3])
    words = [one.reach and one.reach.word for one in heard]
    assert words == ["low", "refused", "refused", None]
    few = "few sequences carry the gradient (ESS/n below 0.3): look at it on held-out tasks"
    assert [few in one.said.getvalue() for one in heard] == [True, False, False, False]
    assert heard[0].reach is not None
    assert f"reach: ESS/n of sequences {heard[0].reach.sequence_ess:.3f}" in heard[0].said.getvalue()


def test_a_student_learns_from_a_teacher(place: Place, beginner: Path) -> None:
    for name in ("distill-forward", "distill-reverse"):
        last, heard = branch(place.bus, place.settings, name, method=name, teacher=beginner, steps=2, save_every=2)
        assert (last["version"], heard.steps, heard.reach) == (1, [1, 2], None)
        assert heard.items == 1600, "every sample, whatever its reward"
        assert violations(place.bus, place.settings, name) == []
    with pytest.raises(BranchError, match="--teacher"):
        branch(place.bus, place.settings, "c", method="distill-forward")


def test_a_branch_that_dies_anywhere_goes_on_to_the_same_bytes(place: Place, beginner: Path) -> None:
    """The log grows meanwhile, and the branch learns from what it began with."""
    branch(place.bus, place.settings, "whole", **SHORT)
    assert [version for version, _ in ends(place, "whole")] == [0, 1, 2, 3]
    for number, point in enumerate(POINTS):
        name = f"dies-{number}"

        def hook(passed: str, point: str = point) -> None:
            if passed == point:
                raise Died

        before = faults.install(hook)
        try:
            with pytest.raises(Died):
                branch(place.bus, place.settings, name, **SHORT)
        finally:
            faults.install(before)
        branch(place.bus, place.settings, name, **SHORT)
        assert [digest for _, digest in ends(place, name)] == [digest for _, digest in ends(place, "whole")], point
        assert violations(place.bus, place.settings, name) == []
    play(place.bus, place.settings, beginner, range(400, 404), size=4, seed=3)
    _, heard = branch(place.bus, place.settings, "whole", **SHORT)
    assert (heard.steps, heard.went_on) == ([], [3]), "nothing is left to do"


def test_files_of_a_branch_that_died_behind_its_last_version_are_collected(place: Place) -> None:
    """Also where nothing is left to train."""
    branch(place.bus, place.settings, "whole", **SHORT)
    left = 3

    def hook(passed: str) -> None:
        nonlocal left
        left -= passed == "branch.committed"
        if not left:
            raise Died

    before = faults.install(hook)
    try:
        with pytest.raises(Died):
            branch(place.bus, place.settings, **SHORT)
    finally:
        faults.install(before)
    root = Path(events(place.bus, place.settings)[0]["uri"]).parent
    (root / ".tmp-v2-0123456789ab").mkdir()
    _, heard = branch(place.bus, place.settings, **SHORT)
    assert (heard.steps, heard.went_on) == ([], [3]), "nothing is left to do"
    whole = Path(events(place.bus, place.settings, "whole")[0]["uri"]).parent
    assert sorted(path.name for path in root.iterdir()) == sorted(path.name for path in whole.iterdir())
    stranger = root / "v3-0123456789ab"
    stranger.mkdir()
    (stranger / PIN).touch()
    with pytest.raises(BranchError, match=f"{stranger.name} was never announced.*{PIN}"):
        branch(place.bus, place.settings, **SHORT)
    (stranger / PIN).unlink()
    assert branch(place.bus, place.settings, **SHORT)[1].went_on == [3]
    assert not stranger.exists()


def test_two_that_begin_one_branch_at_once(place: Place) -> None:
    """The second is told who begins it, and changes nothing of what the first has chosen."""
    refused = list[str]()

    def second(name: str) -> None:
        if name == "branch.kept":
            with pytest.raises(BranchError) as error:
                branch(place.bus, place.settings, method="awr", **SHORT)
            refused.append(str(error.value))

    before = faults.install(second)
    try:
        branch(place.bus, place.settings, **SHORT)
    finally:
        faults.install(before)
    assert [f"process {os.getpid()} on" in said for said in refused] == [True]
    assert branch(place.bus, place.settings, **SHORT)[0]["version"] == ends(place)[-1][0], "it can go on"
    assert violations(place.bus, place.settings) == []


def test_a_branch_goes_on_from_where_it_began_though_its_source_trained_on(place: Place) -> None:
    """Also when the files of the version that it began at are collected."""
    began = train_on(place.bus, place.settings)
    branch(place.bus, place.settings, "whole", version=1, **SHORT)

    def hook(passed: str) -> None:
        if passed == "branch.sent_weights":
            raise Died

    before = faults.install(hook)
    try:
        with pytest.raises(Died):
            branch(place.bus, place.settings, **SHORT)
    finally:
        faults.install(before)
    train_on(place.bus, place.settings)
    shutil.rmtree(began["uri"])
    _, heard = branch(place.bus, place.settings, **SHORT)
    assert heard.went_on == [0]
    assert events(place.bus, place.settings)[0]["parent"] == 1
    assert ends(place) == ends(place, "whole")
    assert violations(place.bus, place.settings) == []
    with pytest.raises(BranchError, match="no branch of version 2 of pico, but of version 1 of pico"):
        branch(place.bus, place.settings, version=2, **SHORT)
    with pytest.raises(BranchError, match="the files of version 1 of pico are gone"):
        branch(place.bus, place.settings, "late", version=1, **SHORT)


def test_a_branch_goes_on_in_a_deployment_that_was_moved(place: Place, tmp_path: Path) -> None:
    branch(place.bus, place.settings, "whole", **SHORT)

    def hook(passed: str) -> None:
        if passed == "branch.committed":
            raise Died

    before = faults.install(hook)
    try:
        with pytest.raises(Died):
            branch(place.bus, place.settings, **SHORT)
    finally:
        faults.install(before)
    old = policy_names.weights_root(place.settings).parent
    place.settings = place.settings.model_copy(update={"objects": str(tmp_path / "moved")})
    new = policy_names.weights_root(place.settings).parent
    new.parent.mkdir(parents=True)
    old.rename(new)
    _, heard = branch(place.bus, place.settings, **SHORT)
    assert heard.went_on == [1]
    branch(place.bus, place.settings, "late", **SHORT)
    assert ends(place) == ends(place, "late") == ends(place, "whole")
    assert {Path(event["uri"]).parent.parent for event in events(place.bus, place.settings, "late")} == {new}


def test_a_name_that_is_taken_is_refused(place: Place) -> None:
    branch(place.bus, place.settings, **SHORT)
    with pytest.raises(Exception, match="other settings"):
        branch(place.bus, place.settings, **SHORT | {"lr": 1e-4})
    with pytest.raises(BranchError, match="a name of its own"):
        branch(place.bus, place.settings, "pico")
    with pytest.raises(BranchError, match="has no version 7"):
        branch(place.bus, place.settings, "other", version=7)
    branch(place.bus, place.settings.model_copy(), "second", **SHORT)
    own = place.settings.model_copy(update={"policy": place.settings.policy.model_copy(update={"name": "second"})})
    with pytest.raises(PolicyError, match="is no branch of version"):
        branch(place.bus, own, "b", version=0, question=lambda selector: SelectionResult())


def test_a_selection_that_is_lost_or_left_empty_is_refused(place: Place) -> None:
    def nothing(selector: Selector) -> SelectionResult:
        return selector.by_rule(lambda _: False)

    with pytest.raises(BranchError, match="nothing is left to learn from: not asked for"):
        branch(place.bus, place.settings, question=nothing)
    assert "t.b.weights" not in place.bus.topics("t."), "nothing was announced"
    last, _ = branch(place.bus, place.settings, **SHORT)
    (Path(last["uri"]).parent / selection_file.FILE).unlink()
    with pytest.raises(BranchError, match="says what the branch learns from"):
        branch(place.bus, place.settings, **SHORT)


def test_rewards_of_a_replay_are_learned_from_instead_of_the_sealed_ones(place: Place) -> None:
    """What a replay liked is imitated, though it was sealed as bad; a later rubric is no matter to who goes on."""
    deployment = place.bus, place.settings.namespace, "pico"
    rows = list(History(*deployment).rows(TRAJECTORIES))
    sealed = {row["id"]: row["reward"] or 0.0 for row in rows}
    judge(*deployment, "v2", {name: 1 - value for name, value in sealed.items()}, "second")
    branch(place.bus, place.settings, "whole", rewards="second", **SHORT)
    items = selection_file.read(Path(events(place.bus, place.settings, "whole")[0]["uri"]).parent).items
    first = {row.place: sealed[row["id"]] for row in rows}
    assert [item.rewards for item in items] == [(1 - first[item.places[0]],) for item in items]
    assert min(first[item.places[0]] for item in items) < max(sealed.values())

    def hook(passed: str) -> None:
        if passed == "branch.committed":
            raise Died

    before = faults.install(hook)
    try:
        with pytest.raises(Died):
            branch(place.bus, place.settings, rewards="second", **SHORT)
    finally:
        faults.install(before)
    judge(*deployment, "v3", sealed, "second")
    branch(place.bus, place.settings, rewards="second", **SHORT)
    assert ends(place) == ends(place, "whole")
    said = {(event["reward_source"], event["reward_rubric"]) for event in events(place.bus, place.settings)[1:]}
    assert said == {("second", "v2")}
    with pytest.raises(BranchError, match="judged by the rubrics v2, v3: choose one, such as second/v3"):
        branch(place.bus, place.settings, "late", rewards="second")


def test_live_rewards_that_came_too_late_are_learned_from_when_they_are_chosen(place: Place) -> None:
    deployment = place.bus, place.settings.namespace, "pico"
    rows = list(History(*deployment).rows(TRAJECTORIES))
    sealed = {row["id"]: row["reward"] or 0.0 for row in rows}
    live: dict[str, Any] = {"source": "user", "replay": None}
    judge(*deployment, "1", sealed, **live)
    judge(*deployment, "1", {name: 1 - value for name, value in sealed.items()}, **live, n=1)  # the second never counts
    judge(*deployment, "1", dict.fromkeys(sealed, None), **live, n=2)  # and failed, so it says nothing
    judge(*deployment, "1", sealed, "user")  # of a replay, so no live one
    branch(place.bus, place.settings, rewards="live:user", **SHORT)
    first = {row.place: sealed[row["id"]] for row in rows}
    items = selection_file.read(Path(events(place.bus, place.settings)[0]["uri"]).parent).items
    assert [item.rewards for item in items] == [(1 - first[item.places[0]],) for item in items]
    said = {(event["reward_source"], event["reward_rubric"]) for event in events(place.bus, place.settings)[1:]}
    assert said == {("live:user", "1")}
    report = audit(place.bus, place.settings.namespace, "b", files=True)
    assert all(report.finding(law).holds for law in ("versions", "tiles", "weights", "ledger-chain", "files"))
    judge(*deployment, "2", sealed, **live, n=3)
    with pytest.raises(BranchError, match="judged by the rubrics 1, 2: choose one, such as live:user/2"):
        branch(place.bus, place.settings, "late", rewards="live:user")


def test_rewards_that_nobody_gave_are_refused(place: Place) -> None:
    with pytest.raises(BranchError, match=r"no replay gave rewards of math/v2.* and live:math takes the newest"):
        branch(place.bus, place.settings, rewards="math/v2")
    with pytest.raises(BranchError, match="no live reward of math/v2 can be learned from"):
        branch(place.bus, place.settings, rewards="live:math/v2")
