"""What is told of a trajectory is what the log holds, token for token and reward for reward."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.consumers.tell.account import Account, runs_of
from millrace.consumers.tell.command import account_of
from millrace.consumers.tell.topics import PolicyTopics
from millrace.infra.log.history.rows import as_stored
from millrace.schemas import codec
from millrace.schemas.arrays import pack, unpack
from tests.support.conversations import Conversations
from tests.support.history_log import NS
from tests.support.history_records import POLICY


@cache
def world() -> Conversations:
    return Conversations(5)


def told(wanted: str, source: Conversations | None = None) -> Account:
    return account_of(PolicyTopics((source or world()).bus, NS, POLICY, as_stored), wanted)


def samples() -> list[dict[str, Any]]:
    return [row for _, row in world().rows("trajectories")]


@pytest.mark.parametrize("which", range(0, 20, 3))
def test_tokens_versions_and_rewards_are_those_that_were_sealed(which: int) -> None:
    sample = samples()[which]
    found = told(sample["id"])
    (lineage,) = found.lineages
    sealed = sample["lineages"][0]
    assert [token for run in lineage.runs for token in run.tokens] == unpack(sealed["tokens"]).tolist()
    versions = [run.version if run.version is not None else -1 for run in lineage.runs for _ in run.tokens]
    assert versions == unpack(sealed["versions"]).tolist()
    assert [one for run in lineage.runs for one in (run.logprobs or (0.0,) * len(run.tokens))] == unpack(
        sealed["logprobs"]
    ).tolist()
    mask = [int(run.weight in ("trained", "may train")) for run in lineage.runs for _ in run.tokens]
    assert mask == unpack(sealed["mask"]).tolist()
    assert (found.reward, found.task, found.group) == (sample["reward"], sample["task_id"], sample["group"])
    (reward,) = found.rewards
    assert (reward.value, reward.fate) == (sample["reward"], "counted")


def test_what_trained_on_it_is_what_the_ledger_says() -> None:
    copy = world().copy()
    copy.rewrite(copy.rows("ledger")[-1][0], None)  # the groups of the newest version wait
    versions = {
        place["offset"] * 100 + place["partition"]: entry["version"]
        for _, entry in copy.rows("ledger")
        for group in entry["groups"]
        for place in group["trajectories"]
    }
    trained = 0
    for record, sample in world().rows("trajectories"):
        expected = versions.get(record.offset * 100 + record.partition)
        found = told(sample["id"], copy)
        assert [one.version for one in found.trained] == ([expected] if expected is not None else [])
        weights = {run.weight for run in found.lineages[0].runs} - {"context", "left out"}
        assert weights == ({"trained"} if expected is not None else {"may train"})
        trained += expected is not None
        if expected is not None:
            group = [one["reward"] for one in samples() if one["group"] == sample["group"]]
            assert found.trained[0].advantage == pytest.approx(sample["reward"] - sum(group) / len(group))
    assert 0 < trained < len(samples())


def test_messages_and_tool_calls_are_told_in_order() -> None:
    sample = samples()[0]
    (branch,) = told(sample["id"]).branches
    kinds = [turn.kind for turn in branch.turns]
    assert kinds.index("tool_call") + 1 == kinds.index("tool_result")
    spoken = [said for turn in branch.turns if turn.kind == "model_call" for said in turn.said]
    assert spoken[:2] == [("system", "Be brief."), ("user", f"Do {sample['task_id']}.")]
    talk = world().said[sample["id"]]
    replies = [text for who, text in spoken if who == "assistant"]
    assert [message["content"] for message in talk if message["role"] == "assistant"][-1] == replies[-1]
    assert any(who == "assistant calls" and "look" in text for who, text in spoken)


def test_a_reward_that_came_too_late_is_told_with_its_fate() -> None:
    copy = world().copy()
    record, event = next(pair for pair in copy.rows("events") if pair[1]["kind"] == "reward")
    _, letter = copy.rows("dead-letters")[0]
    late = {**letter, "id": "late", "stage": "seal", "reason": "late_reward", "detail": "it was sealed"}
    late |= {"place": record.place._asdict(), "event_id": event["id"], "group": event["group"]}
    copy.append("dead-letters", "DeadLetter", late, "k")
    (reward,) = told(event["trajectory"], copy).rewards
    assert (reward.fate, reward.detail) == ("late_reward", "it was sealed")


def test_a_reward_before_its_sample_is_sealed_waits() -> None:
    copy = world().copy()
    record, sample = copy.rows("trajectories")[0]
    copy.rewrite(record, None)
    found = told(sample["id"], copy)
    assert [reward.fate for reward in found.rewards] == ["waits"]
    assert (found.place, found.lineages, found.trained) == (None, (), ())


def test_what_was_withheld_is_told_as_left_out() -> None:
    replies = {
        body["response_id"]: event["trajectory"]
        for _, event in world().rows("events")
        if event["kind"] == "model_call" and not (body := codec.decode_body("model_call", event["body"]))["trainable"]
    }
    assert replies
    for trajectory in set(replies.values()) & {sample["id"] for sample in samples()}:
        found = told(trajectory)
        assert "left out" in found.lineages[0].count()
        assert any("audit_only: redacted" in note for turn in found.branches[0].turns for note in turn.notes)


def test_a_sub_agent_has_a_branch_of_its_own() -> None:
    copy = world().copy()
    sample = samples()[0]
    for record, event in copy.rows("events"):
        if event["trajectory"] == sample["id"] and event["kind"].startswith("tool"):
            copy.rewrite(record, {**event, "trajectory": "child", "parent_trajectory": sample["id"]})
    root, child = told(sample["id"], copy).branches
    assert (root.id, root.parent, child.id, child.parent) == (sample["id"], None, "child", sample["id"])
    assert [turn.kind for turn in child.turns] == ["tool_call", "tool_result"]


def test_it_is_whole_as_json() -> None:
    found = told(samples()[0]["id"])
    again = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert again["id"] == found.id
    assert sum(run["end"] - run["start"] for run in again["lineages"][0]["runs"]) == samples()[0]["length"]


@given(
    rows=st.lists(
        st.tuples(st.integers(0, 9), st.booleans(), st.floats(-9, 0, width=32), st.integers(-1, 6)), max_size=30
    ),
    version=st.none() | st.integers(1, 7),
    eta=st.integers(0, 3),
    masked=st.integers(0, 1),
)
def test_runs_hold_every_token_once_with_its_weight(
    rows: list[tuple[int, bool, float, int]], version: int | None, eta: int, masked: int
) -> None:
    tokens, mask, logprobs, versions = zip(*rows, strict=True) if rows else ((), (), (), ())
    lineage: Any = {"id": "l", "calls": [], "tokens": pack(tokens, "int32"), "mask": pack(mask, "uint8")}
    lineage |= {"logprobs": pack(logprobs, "float32"), "versions": pack(versions, "int32")}
    entry: Any = None if version is None else _entry(version, eta, masked)
    found = runs_of(lineage, entry)
    assert [token for run in found.runs for token in run.tokens] == list(tokens)
    assert [run.start for run in found.runs] + [found.length] == [0, *(run.end for run in found.runs)]
    for run in found.runs:
        for at in range(run.start, run.end):
            if not mask[at]:
                expected = "context" if versions[at] < 0 else "left out"
            elif version is None:
                expected = "may train"
            else:
                expected = "stale" if masked and version - 1 - versions[at] > eta else "trained"
            assert run.weight == expected


def _entry(version: int, eta: int, masked: int) -> Any:
    return {"version": version, "eta": eta, "masked_tokens": masked}


def test_a_lineage_whose_arrays_are_none_is_told_beside_the_others() -> None:
    sound = samples()[0]["lineages"][0]
    broken: Any = {**sound, "mask": {"dtype": "word", "data": b"123"}}
    found = runs_of(broken, None)
    assert (found.id, found.runs, found.length) == (sound["id"], (), 0)
    assert found.unreadable == "3 bytes are no array of word"
    assert runs_of(sound, None).unreadable is None
