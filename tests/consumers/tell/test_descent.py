"""Lineages against the log itself: every edge that is told lies there, and none that lies there is missing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from functools import cache
from io import StringIO
from typing import Any

import pytest

from millrace.consumers.tell.command import TreeAnswer, lineage_in
from millrace.consumers.tell.topics import PolicyTopics
from millrace.infra.errors import LookError
from millrace.infra.log.base import Place
from millrace.infra.terminal import Terminal
from millrace.schemas.arrays import unpack
from tests.support.conversations import Conversations
from tests.support.grafted import graft
from tests.support.history_log import NS
from tests.support.history_records import POLICY


@cache
def world() -> Conversations:
    return Conversations(0, versions=8)


def found(wanted: str, *, task: bool = False, source: Conversations | None = None) -> Any:
    shown: TreeAnswer = lineage_in(PolicyTopics((source or world()).bus, NS, POLICY), wanted, task=task)
    return json.loads(json.dumps(shown.json))


def text(wanted: str, source: Conversations | None = None, policy: str = POLICY) -> str:
    out = StringIO()
    shown = lineage_in(PolicyTopics((source or world()).bus, NS, policy), wanted)
    Terminal(file=out, width=300).print(shown.tree, highlight=False)
    return out.getvalue()


def at(place: dict[str, Any]) -> dict[str, Any]:
    return next(
        row
        for record, row in world().rows("trajectories")
        if (record.partition, record.offset) == (place["partition"], place["offset"])
    )


def sampled(sample: dict[str, Any]) -> dict[str, int]:
    mask, versions = (unpack(sample["lineages"][0][name]) for name in ("mask", "versions"))
    return {str(version): count for version, count in sorted(Counter(versions[mask != 0].tolist()).items())}


@pytest.mark.parametrize("wanted", ["3", "v3", f"{POLICY}@3"])
def test_a_version_names_its_parents_groups_trajectories_and_children(wanted: str) -> None:
    told = found(wanted)
    entry = world().rows("ledger")[3][1]
    assert (told["kind"], told["version"], told["digest"]) == ("version", 3, entry["digest"])
    assert told["parents"] == versions(POLICY, [2, 1, 0])
    assert told["children"] == versions(POLICY, [4])
    assert [group["seq"] for group in told["groups"]] == [group["seq"] for group in entry["groups"]]
    for group, of in zip(told["groups"], entry["groups"], strict=True):
        rows = [at(place) for place in of["trajectories"]]
        assert [member["id"] for member in group["members"]] == [row["id"] for row in rows]
        assert [member["sampled"] for member in group["members"]] == [sampled(row) for row in rows]
        assert [member["task"] for member in group["members"]] == [row["task_id"] for row in rows]
        assert {tuple(member["engines"]) for member in group["members"]} == {("inprocess 1 (e1)",)}
        assert group["gone"] == 0


def test_forward_a_version_reaches_those_that_trained_on_groups_around_it() -> None:
    ready = {row["seq"]: row for _, row in world().rows("resolutions") if row["kind"] == "ready"}
    expected = Counter(
        entry["version"]
        for _, entry in world().rows("ledger")
        for group in entry["groups"]
        if ready[group["seq"]]["v_head"] <= 2 <= ready[group["seq"]]["v_tail"]
    )
    assert found("2")["reached"] == [
        {"policy": POLICY, "version": version, "groups": count} for version, count in sorted(expected.items())
    ]


def test_the_first_version_has_no_parent_and_the_newest_no_child() -> None:
    assert found("0")["parents"] == found("0")["groups"] == []
    assert "it is the first" in text("0")
    newest = len(world().rows("weights")) - 1
    assert found(str(newest))["children"] == []
    assert "no later version" in text(str(newest))


def test_a_trajectory_names_what_sampled_it_and_what_trained_on_it() -> None:
    trained = {
        at(place)["id"]: entry["version"]
        for _, entry in world().rows("ledger")
        for group in entry["groups"]
        for place in group["trajectories"]
    }
    newest = len(world().rows("weights")) - 1
    for _, sample in world().rows("trajectories")[::5]:
        told = found(sample["id"])
        assert told["kind"] == "trajectory"
        assert told["member"]["sampled"] == sampled(sample)
        version = trained.get(sample["id"])
        assert told["member"]["trained"] == versions(POLICY, [] if version is None else [version])
        assert told["children"] == versions(POLICY, [] if version is None else range(version + 1, newest + 1))
        assert (f"trained version {version}" if version is not None else "trained no version") in text(sample["id"])


def test_a_task_names_its_trajectories_and_what_saw_them() -> None:
    _, sample = world().rows("trajectories")[0]
    told = found(sample["task_id"])
    rows = [row for _, row in world().rows("trajectories") if row["task_id"] == sample["task_id"]]
    assert {member["id"] for member in told["members"]} == {row["id"] for row in rows}
    assert f"{len(rows)} trajectories" in text(sample["task_id"])
    expired = next(row for _, row in world().rows("resolutions") if row["kind"] == "expired")
    told = found(expired["prompt_id"])
    assert (told["tickets"], told["members"], told["unfinished"]) == ([expired["ticket"]], [], {"expired": 1})


def test_an_evaluation_and_what_retention_took_are_told() -> None:
    _, sample = world().rows("evaluations")[0]
    assert found(sample["id"])["member"]["split"] == "evaluation"
    copy = world().copy()
    place = world().rows("ledger")[2][1]["groups"][0]["trajectories"][0]
    record = next(r for r, _ in copy.rows("trajectories") if r.place._asdict() == place)
    copy.rewrite(record, None)
    group = found("2", source=copy)["groups"][0]
    assert (group["gone"], len(group["members"])) == (1, 1)


@pytest.mark.parametrize(
    ("wanted", "task", "words"),
    [
        ("99", False, "has no version 99: its newest is 8"),
        ("nobody", False, "nothing is known"),
        ("99", True, "no task '99'"),
        ("other@3", False, "nothing is known"),
    ],
)
def test_what_nobody_knows_is_an_error_that_says_so(wanted: str, task: bool, words: str) -> None:
    with pytest.raises(LookError, match=words):
        found(wanted, task=task)


BRANCH, AT, LATER = "branch", 3, 6


@cache
def branched() -> Conversations:
    """The world with a branch from version 3 that has 6 more versions, so that numbers of both exist in both."""
    copy = world().copy()
    groups = [
        (group["group"], [Place(**place) for place in group["trajectories"]])
        for _, entry in world().rows("ledger")[1 : LATER + 1]
        for group in entry["groups"][:1]
    ]
    graft(copy.bus, NS, POLICY, AT, BRANCH, [[group] for group in groups])
    return copy


def of_branch(wanted: str) -> Any:
    return json.loads(json.dumps(lineage_in(PolicyTopics(branched().bus, NS, BRANCH), wanted).json))


def versions(policy: str, numbers: Sequence[int]) -> list[dict[str, Any]]:
    return [{"policy": policy, "version": number} for number in numbers]


def test_a_branch_descends_from_the_version_that_it_begins_at() -> None:
    told = of_branch("0")
    assert told["parents"] == versions(POLICY, [3, 2, 1, 0])
    assert told["children"] == versions(BRANCH, [1])
    told = of_branch("5")
    assert told["parents"] == versions(BRANCH, [4, 3, 2, 1, 0]) + versions(POLICY, [3, 2, 1, 0])
    assert of_branch(str(LATER))["children"] == []
    assert found("3", source=branched())["children"] == versions(POLICY, [4]) + versions(BRANCH, [0])
    shown = text("5", branched(), BRANCH)
    assert f"versions 0–4, {POLICY}@0–3" in shown


def test_a_version_of_a_branch_names_what_it_took_of_another_policys_topic() -> None:
    told = of_branch("2")
    (group,), (taken, *_) = told["groups"], world().rows("ledger")[2][1]["groups"]
    assert (group["id"], group["seq"], group["ticket"], group["gone"]) == (taken["group"], None, None, 0)
    assert [member["id"] for member in group["members"]] == [at(place)["id"] for place in taken["trajectories"]]
    assert {member["policy"] for member in group["members"]} == {POLICY}
    assert {tuple(member["engines"]) for member in group["members"]} == {("inprocess 1 (e1)",)}
    shown = text("2", branched(), BRANCH)
    assert f"group {taken['group']}" in shown
    assert "seq " not in shown
    assert "ticket None" not in shown
    assert f"sampled by versions: {POLICY}@" in shown


def test_a_trajectory_and_its_task_name_the_branches_that_trained_on_it() -> None:
    sample = at(world().rows("ledger")[2][1]["groups"][0]["trajectories"][0])
    told = found(sample["id"], source=branched())
    assert told["member"]["trained"] == versions(POLICY, [2]) + versions(BRANCH, [2])
    newest = len(world().rows("weights")) - 1
    assert told["children"] == versions(POLICY, range(3, newest + 1)) + versions(BRANCH, range(LATER + 1)), (
        "the branch begins at version 3, which descends from version 2"
    )
    assert f"trained versions 2, {BRANCH}@2" in text(sample["id"], branched())
    (member,) = [m for m in found(sample["task_id"], source=branched())["members"] if m["id"] == sample["id"]]
    assert member["trained"] == told["member"]["trained"]


def test_a_trajectory_that_only_a_branch_learned_from_trained_a_version() -> None:
    copy = world().copy()
    newest, entry = copy.rows("ledger")[-1]
    copy.rewrite(newest, None)
    group = entry["groups"][0]
    sample = at(group["trajectories"][0])
    assert found(sample["id"], source=copy)["member"]["trained"] == []
    graft(copy.bus, NS, POLICY, 1, BRANCH, [[(group["group"], [Place(**group["trajectories"][0])])]])
    assert found(sample["id"], source=copy)["member"]["trained"] == versions(BRANCH, [1])
    assert f"trained version {BRANCH}@1" in text(sample["id"], copy)


def test_forward_a_version_reaches_branches_that_trained_on_groups_around_it() -> None:
    ready = {row["group"]: row for _, row in world().rows("resolutions") if row["kind"] == "ready"}
    taken = [entry["groups"][0]["group"] for _, entry in world().rows("ledger")[1 : LATER + 1]]
    expected = [
        {"policy": BRANCH, "version": number, "groups": 1}
        for number, group in enumerate(taken, 1)
        if ready[group]["v_head"] <= 2 <= ready[group]["v_tail"]
    ]
    reached = found("2", source=branched())["reached"]
    assert [one for one in reached if one["policy"] == BRANCH] == expected
    assert expected
    assert [one for one in reached if one["policy"] == POLICY] == found("2")["reached"]


def test_groups_of_one_name_are_told_apart_by_where_their_samples_lie() -> None:
    """Tenants choose the names of their groups, so two may choose the same."""
    ready = [row for _, row in world().rows("resolutions") if row["kind"] == "ready"]
    near = next(row for row in ready if row["v_head"] <= 2 <= row["v_tail"])
    far = next(row for row in ready if row["v_head"] > 2)
    copy = world().copy()
    graft(copy.bus, NS, POLICY, AT, BRANCH, [[(near["group"], [Place(**place) for place in far["trajectories"]])]])
    assert [one for one in found("2", source=copy)["reached"] if one["policy"] == BRANCH] == []
    around = found(str(far["v_head"]), source=copy)["reached"]
    assert {"policy": BRANCH, "version": 1, "groups": 1} in around


def test_a_version_of_any_policy_is_found_by_its_whole_name() -> None:
    assert found(f"{BRANCH}@2", source=branched()) == of_branch("2")


def test_a_forged_place_in_any_other_topic_is_gone() -> None:
    copy = world().copy()
    forged = [Place(f"{NS}.events", 0, 0), Place(f"other.{POLICY}.trajectories", 0, 0), Place("", 0, 0)]
    graft(copy.bus, NS, POLICY, 1, BRANCH, [[("g", forged)]])
    (group,) = lineage_in(PolicyTopics(copy.bus, NS, BRANCH), "1").json["groups"]
    assert (group["gone"], group["members"]) == (3, [])
