"""Every layout, in one suite: what a row says is what its events say, nothing trains, and nothing else is raised."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, cast

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millrace.dialects.dialogue import dialogue
from millrace.formats.files import reader
from millrace.formats.imports.check import layout_of
from millrace.formats.layouts import OTHER_NAMES, READERS
from millrace.infra.errors import ImportRefused
from millrace.schemas.chain import START, event_hash
from millrace.schemas.records import Event, ModelCall
from tests.support.imported import ASKED, AT, CALL, ROWS, SAYS, TALK, TOOL, bodies, decoded, read, write

NAMES = sorted(READERS)
PAIRS = {"trl-preference", "openai-preference", "atropos"}
WITH_TOOLS = {"chat", "jsonl", "verl", "verifiers", "otlp"}


def example(name: str, folder: Path) -> Path:
    return write(folder / name, ROWS[name])


@pytest.mark.parametrize("name", NAMES)
def test_a_layout_is_told_from_its_first_row(name: str, tmp_path: Path) -> None:
    path = example(name, tmp_path)
    assert layout_of(reader(path), "").name == name
    assert layout_of(reader(path), name).name == name


@pytest.mark.parametrize("name", NAMES)
def test_what_a_row_says_is_what_its_events_say(name: str, tmp_path: Path) -> None:
    found, refused = read(example(name, tmp_path))
    assert refused == []
    ((group, records),) = found
    assert len(group.episodes) == (2 if name in PAIRS else 1)
    first = [pair for pair in decoded(records) if pair[0]["trajectory"] == decoded(records)[0][0]["trajectory"]]
    kinds = [event["kind"] for event, _ in first]
    assert (kinds[0], kinds[-2:]) == ("episode_started", ["reward", "episode_ended"])
    calls = [cast(ModelCall, body) for event, body in first if event["kind"] == "model_call"]
    said = dialogue(calls[-1])
    whole = [*ASKED, SAYS] if name in PAIRS else TALK
    assert said.reply == SAYS
    assert [(one["role"], one["content"]) for one in said.whole] == [(one["role"], one["content"]) for one in whole]
    if name in WITH_TOOLS:
        assert kinds[1:5] == ["model_call", "tool_call", "tool_result", "model_call"]
        asked, answered = first[2][1], first[3][1]
        assert (asked["call_id"], asked["name"]) == (answered["call_id"], answered["name"]) == ("c1", "look")
        assert orjson.loads(asked["arguments"]) == orjson.loads(cast(Any, CALL)["function"]["arguments"])
        assert (asked["response_id"], answered["content"]) == (calls[0]["response_id"], "rain")
        assert len({call["lineage"] for call in calls}) == 1
        assert said.tools == ([] if name in ("jsonl", "otlp") else [TOOL])
    (reward,) = [body for event, body in first if event["kind"] == "reward"]
    assert reward["value"] == (1.0 if name == "openai-preference" else 0.75)
    assert reward["source"].partition(":")[0] == "import"
    assert (reward["independent"], reward["replay"]) == (False, None)
    assert first[-1][1]["output"] == "It rains."


@pytest.mark.parametrize("name", NAMES)
def test_an_imported_call_has_no_token_and_says_so(name: str, tmp_path: Path) -> None:
    ((group, records),), _ = read(example(name, tmp_path))
    calls = bodies(records, "model_call")
    assert calls
    for call in calls:
        assert all(call[part]["data"] == b"" for part in ("prompt_ids", "output_ids", "output_logprobs"))
        assert (call["trainable"], call["untrainable_reason"], call["engine"]) == (False, "imported", "import")
    assert {bool(one.exact_tokens) for one in group.episodes} == {name in ("jsonl", "atropos")}


@pytest.mark.parametrize("name", NAMES)
def test_events_are_numbered_chained_and_always_the_same(name: str, tmp_path: Path) -> None:
    twice = write(tmp_path / "twice", [row for _ in range(2) for row in ROWS[name]] if name != "otlp" else ROWS[name])
    found, _ = read(twice)
    again, _ = read(twice)
    assert [records for _, records in found] == [records for _, records in again]
    records = [record for _, those in found for record in those]
    events = [event for event, _ in decoded(records)]
    for group in (those for _, those in found):
        numbers = [event["source_seq"] for event, _ in decoded(group)]
        assert numbers == list(range(len(group)))
        assert [record.headers["source-seq"] for record in group] == [str(n).encode() for n in numbers]
    assert len({event["source"] for event in events}) == len(found)
    assert len({event["id"] for event in events}) == len(events)
    links: dict[str, tuple[int, bytes]] = {}
    for event in events:
        step, link = links.get(event["trajectory"], (0, START))
        assert (event["step"], event["prev_hash"]) == (step, link)
        assert event["hash"] == event_hash(link, cast(Event, event))
        links[event["trajectory"]] = (step + 1, event["hash"])


def test_times_splits_tasks_and_ends_are_the_rows_own(tmp_path: Path) -> None:
    found = {name: decoded(read(example(name, tmp_path))[0][0][1]) for name in NAMES}
    assert found["chat"][0][0]["event_time"] == AT
    assert found["otlp"][1][0]["event_time"] == AT + 10_000
    assert found["otlp"][1][1]["latency_us"] == 5_000
    assert (found["otlp"][1][0]["trace_id"], found["otlp"][1][1]["usage"]["prompt"]) == (
        "0af7651916cd43dd8448eb211c80319c",
        11,
    )
    assert found["trl"][0][0]["event_time"] == 0
    assert {name for name, events in found.items() if events[0][0]["split"] == "evaluation"} == {"verl"}
    assert [found[name][0][1]["task_id"] for name in ("jsonl", "verifiers")] == ["t", "7"]
    assert found["chat"][0][1]["task_id"] == found["verl"][0][1]["task_id"], "who is asked the same has one task"
    assert [found[name][-1][1]["status"] for name in ("chat", "jsonl", "verifiers")] == [
        "completed",
        "truncated",
        "truncated",
    ]
    assert orjson.loads(found["chat"][0][1]["task"]) == {"answer": 4, "timestamp": "2024-05-01T10:00:00Z"}
    assert found["jsonl"][-2][1]["components"] == {"verifier": 0.75}


@pytest.mark.parametrize(
    ("row", "code"),
    [
        (b"{", "not_json"),
        (b"[1]", "not_an_object"),
        (b'{"messages": ' + b"[" * 300 + b"]" * 300 + b"}", "too_deep"),
        ({"messages": []}, "no_messages"),
        ({"other": 1}, "no_messages"),
        ({"messages": [{"role": "nobody", "content": ""}]}, "bad_message"),
        ({"messages": [{"role": "user", "content": 3}]}, "bad_message"),
        ({"messages": ASKED}, "no_reply"),
        ({"messages": [SAYS]}, "no_reply"),
        ({"messages": [*ASKED, {"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "bad_tool_call"),
        ({"messages": TALK, "tools": "{}}"}, "not_json"),
        ({"messages": TALK, "tools": [1]}, "bad_tools"),
        ({"messages": TALK, "reward": "much"}, "bad_reward"),
        ({"messages": TALK, "reward": 1e7}, "bad_reward"),
        ({"messages": TALK, "status": "odd"}, "bad_status"),
        ({"messages": TALK, "timestamp": "soon"}, "bad_time"),
        ({"messages": TALK, "timestamp": -1}, "bad_time"),
        ({"messages": TALK, "task_id": "x" * 1025}, "out_of_bounds"),
        ({"messages": [*ASKED, {**SAYS, "extra": [[]] * 100_001}]}, "too_many_values"),
        ({"messages": [{"role": "user", "content": "x" * 400_000}, *[SAYS] * 90]}, "row_too_large"),
    ],
)
def test_a_bad_row_is_refused_by_name_and_the_next_is_read(row: Any, code: str, tmp_path: Path) -> None:
    path = write(tmp_path / "rows", [{"messages": TALK}, row, b"", {"messages": TALK}])
    found, refused = read(path, "chat")
    assert [(number, error.code) for number, error in refused] == [(2, code)]
    assert [group.row for group, _ in found] == [1, 4]
    alone, _ = read(write(tmp_path / "good", [{"messages": TALK}] * 2), "chat")
    assert [records for _, records in found] == [records for _, records in alone], "a refused row uses up no number"


ODD = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just([]) | st.just({})


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_a_row_holds_it_is_read_or_refused(data: st.DataObject, tmp_path: Path) -> None:
    """Any value anywhere in a row is replaced by any other."""
    name = data.draw(st.sampled_from(NAMES))
    rows = copy.deepcopy([dict(row) for row in ROWS[name]])
    for _ in range(data.draw(st.integers(1, 3))):
        at: Any = rows[data.draw(st.integers(0, len(rows) - 1))]
        while at:
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            key = data.draw(st.sampled_from(keys))
            if not isinstance(at[key], dict | list) or not at[key] or data.draw(st.integers(0, 5)) == 0:
                at[key] = data.draw(ODD)
                break
            at = at[key]
    odd = [orjson.dumps(row, default=str, option=orjson.OPT_NON_STR_KEYS) for row in _within_64_bits(rows)]
    found, refused = read(write(tmp_path / "odd", odd), name)
    for _, records in found:
        kinds = [event["kind"] for event, _ in decoded(records)]
        assert kinds.count("episode_started") == kinds.count("episode_ended") >= 1
        assert "model_call" in kinds
    for _, error in refused:
        assert error.code.replace("_", "").isalpha()


def _within_64_bits(rows: list[dict[str, Any]]) -> list[Any]:
    """Integers as a JSON file of anybody may hold them and orjson writes them."""

    def one(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: one(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [one(inner) for inner in value]
        return float(value) if isinstance(value, int) and abs(value) >= 2**63 else value

    return [one(row) for row in rows]


def test_sharegpt_is_a_chat(tmp_path: Path) -> None:
    turns = [("human", "What is the weather?"), ("gpt", "It rains.")]
    row = {"conversations": [{"from": who, "value": text} for who, text in turns], "system": "Be brief."}
    ((_, records),), refused = read(write(tmp_path / "rows", [row, {**row, "conversations": [{"from": "odd"}]}]))
    assert [error.code for _, error in refused] == ["bad_message"]
    (call,) = bodies(records, "model_call")
    assert dialogue(cast(ModelCall, call)).whole == [*ASKED, SAYS]


def test_what_has_no_layout_or_no_rows_is_refused(tmp_path: Path) -> None:
    for rows, words in (
        ([{"text": "x"}], "row 1 has the keys text"),
        ([b"", b"no json"], "no row that can be read"),
        ([b"[{}]"], "one JSON list"),
    ):
        with pytest.raises(ImportRefused, match=words):
            read(write(tmp_path / "odd", rows))
    with pytest.raises(ImportRefused, match="no file"):
        read(tmp_path / "nowhere")
    with pytest.raises(ImportRefused, match="no layout 'x': choose one of otlp"):
        read(example("chat", tmp_path), "x")
    assert set(OTHER_NAMES.values()) <= set(READERS)
