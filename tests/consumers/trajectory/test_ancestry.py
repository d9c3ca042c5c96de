"""Lineages against the log itself: every edge that is told lies there, and none that lies there is missing."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from io import StringIO
from typing import Any

import pytest

from millrace.consumers.trajectory.command import Shown, lineage_in
from millrace.infra.errors import LookError
from millrace.infra.terminal import Terminal
from millrace.schemas.arrays import unpack
from tests.support.conversations import Conversations
from tests.support.history_log import NS
from tests.support.history_records import POLICY


@cache
def world() -> Conversations:
    return Conversations(0, versions=8)


def found(wanted: str, *, task: bool = False, source: Conversations | None = None) -> Any:
    shown: Shown = lineage_in((source or world()).bus, NS, POLICY, wanted, task=task)
    return json.loads(json.dumps(shown.json))


def text(wanted: str) -> str:
    out = StringIO()
    Terminal(file=out, width=300).print(lineage_in(world().bus, NS, POLICY, wanted).tree, highlight=False)
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
    assert told["parents"] == [2, 1, 0]
    assert told["children"] == [4]
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
    assert found("2")["reached"] == {str(version): count for version, count in sorted(expected.items())}


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
        assert told["member"]["trained"] == version
        assert told["children"] == ([] if version is None else list(range(version + 1, newest + 1)))
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
