"""Every layout, in one suite: what it writes is what the log holds, what it cannot say is refused by name, and tools
that are installed here read it."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from pydantic import TypeAdapter

from millrace.formats.exports import ExportSummary, export_from
from millrace.formats.exports.select import Selection
from millrace.formats.files import digest
from millrace.formats.layouts import WRITERS
from millrace.formats.layouts.atropos import NO_LABEL, NO_LOGPROB
from millrace.infra.log.history.reader import History
from millrace.schemas.arrays import unpack
from tests.support.conversations import TOOLS, Conversations
from tests.support.history_log import NS
from tests.support.history_records import POLICY

Rows = list[dict[str, Any]]
TOKENS = sorted(name for name, layout in WRITERS.items() if layout.has_tokens)
TEXTS = sorted(set(WRITERS) - set(TOKENS))
PAIRS = ("trl-preference", "openai-preference")


@cache
def world(seed: int = 0) -> Conversations:
    return Conversations(seed)


def written(
    name: str, folder: Path, source: Conversations, selection: Selection | None = None, owner: str = "local"
) -> tuple[ExportSummary, Rows]:
    out = folder / name
    summary = export_from(History(source.bus, NS, POLICY), name, out, selection or Selection(), owner)
    return summary, loaded(name, out)


def loaded(name: str, out: Path) -> Rows:
    """The rows as the tools of the form read them."""
    form = WRITERS[name].form
    if form == "dataset":
        import datasets

        return [dict(row) for row in datasets.load_from_disk(str(out))]
    if form == "parquet":
        return cast(Rows, parquet.read_table(out).to_pylist())
    return [orjson.loads(line) for line in out.read_bytes().splitlines()]


def sealed(source: Conversations) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for _, row in source.rows("trajectories")}


def traces(source: Conversations) -> list[tuple[list[int], list[int], list[float], list[int], float]]:
    """(tokens, mask, logprobs, versions, reward) of each lineage that lies in the log."""
    return [
        (*(unpack(lineage[part]).tolist() for part in ("tokens", "mask", "logprobs", "versions")), row["reward"])
        for row in sealed(source).values()
        for lineage in row["lineages"]
    ]


def clear(seed: int) -> Conversations:
    """A world in which every call may leave."""
    copy = world(seed).copy()
    for record, event in copy.rows("events"):
        copy.govern(record, event, eligibility="aggregate")
    return copy


def said(name: str, rows: Rows) -> Counter[tuple[object, ...]]:
    """What rows with tokens say, as (tokens, mask, logprobs, reward), whatever their layout."""
    out: list[tuple[list[int], list[int], list[float], float]] = []
    for row in rows:
        if name == "prime-rl":
            tokens = row["prompt_ids"] + row["completion_ids"]
            mask = [int(one) for one in row["prompt_mask"] + row["completion_mask"]]
            out.append((tokens, mask, [0.0] * len(row["prompt_ids"]) + row["completion_logprobs"], 0.0))
        elif name == "atropos":
            for at, tokens in enumerate(row["tokens"]):
                mask = [int(label != NO_LABEL) for label in row["masks"][at]]
                logprobs = [0.0 if one == NO_LOGPROB else one for one in row["inference_logprobs"][at]]
                out.append((tokens, mask, logprobs, row["scores"][at]))
        else:
            out.append((row["tokens"], row["mask"], row["logprobs"], row["reward"]))
    return Counter((tuple(t), tuple(m), tuple(np.float32(p) for p in ps), r) for t, m, ps, r in out)


@pytest.mark.parametrize("name", TOKENS)
@pytest.mark.parametrize("seed", range(3))
def test_exact_tokens_are_those_of_the_log(name: str, seed: int, tmp_path: Path) -> None:
    source = clear(seed)
    summary, rows = written(name, tmp_path, source)
    expected = Counter(
        (tuple(t), tuple(m), tuple(np.float32(p) for p in ps), 0.0 if name == "prime-rl" else r)
        for t, m, ps, _, r in traces(source)
    )
    assert said(name, rows) == expected
    assert (summary.exported, summary.refused, summary.left_out) == (len(sealed(source)), {}, {})
    assert summary.tokens == sum(len(tokens) for tokens, *_ in traces(source))
    assert summary.trainable == sum(sum(mask) for _, mask, *_ in traces(source))


@pytest.mark.parametrize("name", ["jsonl", "parquet", "hf"])
def test_the_exact_layouts_keep_versions_rewards_and_what_was_said(name: str, tmp_path: Path) -> None:
    source = clear(0)
    _, rows = written(name, tmp_path, source)
    trained = {
        (place["partition"], place["offset"]): entry["version"]
        for _, entry in source.rows("ledger")
        for group in entry["groups"]
        for place in group["trajectories"]
    }
    places = {row["id"]: (record.partition, record.offset) for record, row in source.rows("trajectories")}
    assert any(row["trained_version"] for row in rows)
    for row in rows:
        found = sealed(source)[row["trajectory"]]
        assert row["versions"] == unpack(found["lineages"][0]["versions"]).tolist()
        assert (row["reward"], row["task_id"], row["group"]) == (found["reward"], found["task_id"], found["group"])
        assert [one["reward_id"] for one in row["rewards"]] == [one["reward_id"] for one in found["rewards"]]
        assert row["trained_version"] == trained.get(places[row["trajectory"]])
        assert row["tokenizer_hash"] == "t"
        talk = source.said[row["trajectory"]]
        assert [(m["role"], m["content"]) for m in row["messages"]] == [(m["role"], m["content"]) for m in talk]


@pytest.mark.parametrize("name", sorted(WRITERS))
def test_the_manifest_counts_every_trajectory(name: str, tmp_path: Path) -> None:
    source = world(2)
    summary, rows = written(name, tmp_path, source)
    assert summary.read == len(sealed(source))
    assert summary.read == summary.exported + sum(summary.refused.values()) + sum(summary.left_out.values())
    assert summary.rows == len(rows)
    manifest = json.loads((tmp_path / f"{name}.manifest.json").read_text())
    assert manifest == summary.as_json()
    assert manifest["digest"] == digest(tmp_path / name)
    refused = tmp_path / f"{name}.refused.jsonl"
    lines = [orjson.loads(line) for line in refused.read_bytes().splitlines()] if refused.exists() else []
    assert Counter(line["reason"] for line in lines) == summary.refused
    assert {line["trajectory"] for line in lines} <= set(sealed(source))
    left = {path.name for path in tmp_path.iterdir()} - {name, f"{name}.manifest.json", refused.name}
    assert left == set(), "nothing else stays beside it"


@pytest.mark.parametrize("name", sorted(WRITERS))
def test_nothing_that_is_not_cleared_is_written(name: str, tmp_path: Path) -> None:
    source = clear(0)
    barred = {"denied", "audit_only", "tenant_only", "failed"}
    marked: dict[str, str] = {}
    for number, sample in enumerate(sealed(source).values()):
        if number % 5 < 4:
            kind = sorted(barred)[number % 5]
            marked[sample["id"]] = kind
            for record, event in source.calls(sample)[:1]:
                if kind == "failed":
                    source.govern(record, event, redaction="failed")
                else:
                    source.govern(record, event, eligibility=kind)
    summary, _ = written(name, tmp_path, source, owner="somebody else")
    assert summary.refused["ineligible"] == len(marked)
    lines = [orjson.loads(line) for line in (tmp_path / f"{name}.refused.jsonl").read_bytes().splitlines()]
    assert {line["trajectory"] for line in lines if line["reason"] == "ineligible"} == set(marked)
    text = "".join(json.dumps(row, ensure_ascii=False, default=str) for row in loaded(name, tmp_path / name))
    said_of = {id for id in sealed(source) if id in text}
    assert said_of & set(marked) == set()
    assert len(said_of) == summary.exported or name == "prime-rl", "every reply of this world names its trajectory"


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_no_chat_is_refused_by_name(name: str, tmp_path: Path) -> None:
    source = clear(0)
    first = next(iter(sealed(source).values()))
    for record, event in source.calls(first):
        from millrace.schemas import codec

        body = codec.decode_body("model_call", event["body"])
        source.rewrite(record, {**event, "body": codec.encode_body("model_call", {**body, "request": b"no chat"})})
    summary, _ = written(name, tmp_path, source)
    assert summary.refused["no_messages"] == 1
    assert first["id"] in summary.examples["no_messages"][0]


@pytest.mark.parametrize("name", TOKENS)
def test_what_has_no_tokens_is_refused_by_name(name: str, tmp_path: Path) -> None:
    source = clear(0)
    record, sample = source.rows("trajectories")[0]
    source.rewrite(record, {**sample, "lineages": []})
    summary, _ = written(name, tmp_path, source)
    assert summary.refused == {"no_exact_tokens": 1}


@pytest.mark.parametrize("name", sorted(WRITERS))
def test_calls_that_retention_took_are_named(name: str, tmp_path: Path) -> None:
    source = clear(0)
    sample = next(iter(sealed(source).values()))
    source.rewrite(source.calls(sample)[0][0], None)
    summary, _ = written(name, tmp_path, source)
    assert summary.refused["events_gone"] == 1


@pytest.mark.slow
def test_trl_reads_its_layouts(tmp_path: Path) -> None:
    import datasets
    from trl.data_utils import extract_prompt, is_conversational

    source = clear(0)
    for name, keys in (
        ("trl", {"prompt", "completion", "tools"}),
        ("trl-messages", {"messages", "tools"}),
        ("trl-preference", {"prompt", "chosen", "rejected", "score_chosen", "score_rejected", "tools"}),
    ):
        written(name, tmp_path, source)
        found = datasets.load_dataset("json", data_files=str(tmp_path / name), cache_dir=str(tmp_path / "cache"))
        assert set(found["train"].column_names) == keys
        for row in found["train"]:
            assert is_conversational(row)
            assert json.loads(row["tools"]) == TOOLS
    pair = found["train"][0]
    assert pair["score_chosen"] > pair["score_rejected"]
    whole = {name: pair["prompt"] + pair[name] for name in ("chosen", "rejected")}
    assert extract_prompt(whole)["prompt"][: len(pair["prompt"])] == pair["prompt"]


def test_a_row_of_trl_trains_on_one_reply_alone(tmp_path: Path) -> None:
    _, rows = written("trl", tmp_path, clear(0))
    for row in rows:
        assert [message["role"] for message in row["completion"]] == ["assistant"]
        assert row["prompt"][0]["role"] == "system"


def test_openai_knows_its_messages_and_tools(tmp_path: Path) -> None:
    from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

    messages: TypeAdapter[Any] = TypeAdapter(list[ChatCompletionMessageParam])
    tools: TypeAdapter[Any] = TypeAdapter(list[ChatCompletionToolParam])
    _, rows = written("openai", tmp_path, clear(0))
    for row in rows:
        messages.validate_python(row["messages"])
        tools.validate_python(row["tools"])
        assert row["messages"][-1]["role"] == "assistant"
        assert {"role", "content"} <= set(row["messages"][0])


def test_a_preference_of_openai_is_one_reply_over_another(tmp_path: Path) -> None:
    source = clear(0)
    from millrace.schemas import codec

    for record, event in source.rows("events"):  # every call asks the same anew
        if event["kind"] == "model_call":
            body = codec.decode_body("model_call", event["body"])
            asked = orjson.dumps({"messages": [{"role": "user", "content": event["group"]}]})
            whole = {"request": asked, "request_base": None, "request_kept": {}}
            source.rewrite(record, {**event, "body": codec.encode_body("model_call", {**body, **whole})})
    summary, rows = written("openai-preference", tmp_path, source)
    rewards: dict[str, list[float]] = {}
    for row in sealed(source).values():
        rewards.setdefault(row["group"], []).append(row["reward"])
    differing = {group: values for group, values in rewards.items() if len(set(values)) > 1}
    assert len(rows) == len(differing) > 0
    assert summary.refused == {"no_pair": 2}
    assert len(rewards) == len(differing) + 1
    for row in rows:
        assert [m["role"] for m in row["preferred_output"]] == ["assistant"]
        assert row["input"]["messages"][0]["content"] in differing


def test_verl_and_verifiers_have_their_columns(tmp_path: Path) -> None:
    source = clear(0)
    _, rows = written("verl", tmp_path, source)
    assert [row["extra_info"]["index"] for row in rows] == list(range(len(rows)))
    for row in rows:
        found = sealed(source)[row["extra_info"]["trajectory"]]
        assert row["extra_info"]["reward"] == found["reward"]
        assert len(row["prompt"]) == 2
        assert json.loads(row["tools_json"]) == TOOLS
        assert "tools" not in row, "verl would take it for structures"
        assert len(row["messages"]) > len(row["prompt"])
    _, rows = written("verifiers", tmp_path, source)
    ids = {row["info"]["task_id"]: row["example_id"] for row in rows}
    assert sorted(ids.values()) == list(range(len(ids)))
    for row in rows:
        found = sealed(source)[row["info"]["trajectory"]]
        assert row["reward"] == found["reward"]
        assert row["metrics"] == {"verifier": found["reward"]}
        talk = source.said[row["info"]["trajectory"]]
        assert [m["content"] for m in row["prompt"] + row["completion"]] == [m["content"] for m in talk]


def test_an_advantage_of_prime_rl_is_the_reward_over_its_group(tmp_path: Path) -> None:
    source = clear(0)
    _, rows = written("prime-rl", tmp_path, source)
    rewards: dict[str, list[float]] = {}
    for row in sealed(source).values():
        rewards.setdefault(row["group"], []).append(row["reward"])
    expected = [value - sum(group) / len(group) for group in rewards.values() for value in group]
    assert sorted(row["advantage"] for row in rows) == pytest.approx(sorted(expected))


@pytest.mark.slow
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from([name for name in TOKENS if name != "hf"]),  # which is slow to read back
    seed=st.integers(0, 3),
    low=st.floats(0, 1),
    first=st.integers(0, 6),
    best=st.booleans(),
    drop=st.sets(st.integers(0, 40), max_size=6),
)
def test_whatever_is_selected_and_barred_nothing_else_is_said(
    name: str, seed: int, low: float, first: int, best: bool, drop: set[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    from millrace.formats.exports.select import RewardLimit, VersionRange

    source = clear(seed)
    samples = list(sealed(source).values())
    barred = {samples[number]["id"] for number in drop if number < len(samples)}
    for sample in samples:
        for record, event in source.calls(sample)[1:2] if sample["id"] in barred else []:
            source.govern(record, event, eligibility="audit_only")
    selection = Selection(sampled=VersionRange(first, None), rewards=(RewardLimit(">=", low),), best=best)
    summary, rows = written(name, tmp_path_factory.mktemp("out"), source, selection)
    fitting = [s for s in samples if s["reward"] >= low and s["v_tail"] >= first]
    left = [s for s in fitting if s["id"] not in barred]
    if best:
        groups: dict[str, list[dict[str, Any]]] = {}
        for sample in left:
            groups.setdefault(sample["group"], []).append(sample)
        left = [max(group, key=lambda s: (s["reward"], -s["sample"])) for group in groups.values()]
    expected = Counter(tuple(unpack(s["lineages"][0]["tokens"]).tolist()) for s in left)
    assert Counter(tokens for tokens, *_ in said(name, rows).elements()) == expected
    assert summary.refused.get("ineligible", 0) == len([s for s in fitting if s["id"] in barred])


@pytest.mark.parametrize("name", sorted(WRITERS))
def test_nothing_selected_is_an_export_without_rows(name: str, tmp_path: Path) -> None:
    summary, rows = written(name, tmp_path, clear(0), Selection(tasks=frozenset({"no such task"})))
    assert rows == []
    assert summary.left_out == {"task": summary.read}
