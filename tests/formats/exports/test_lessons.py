"""No layout of text teaches what is no whole lesson, whatever became of a reply; imitation agrees with every layout."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millrace.consumers.replay.text import Writer
from millrace.dialects.rendering.choose import choose
from millrace.formats.exports import export_from
from millrace.formats.exports.select import Selection
from millrace.formats.layouts import WRITERS
from millrace.infra.engines.upstream import NOT_WHOLE, UNTRAINABLE
from millrace.infra.log.history.reader import History
from millrace.schemas import codec
from tests.support import chat_tokenizer
from tests.support.conversations import Conversations
from tests.support.history_log import NS
from tests.support.history_records import POLICY

TEXTS = sorted(name for name, layout in WRITERS.items() if not layout.has_tokens and "preference" not in name)
WORLD = Conversations(0, 1)
TOOL = {"role": "tool", "tool_call_id": "c", "content": "rain"}
USER = {"role": "user", "content": "What is the weather?"}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def chat(*messages: dict[str, Any]) -> bytes:
    return orjson.dumps({"messages": messages})


def reply(content: str | None) -> bytes:
    return orjson.dumps({"choices": [{"index": 0, "message": {"role": "assistant", "content": content}}]})


REASONS: dict[str, tuple[str, dict[str, Any]]] = {
    "whole": ("", {}),
    "whole, behind a tool": (
        "",
        {"request": chat(USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, TOOL)},
    ),
    "at a stop string": ("", {"finish_reason": "stop_sequence"}),
    "aborted": ("cut_reply", {"finish_reason": "abort"}),
    "upstream cut": ("cut_reply", {"finish_reason": "error"}),
    "length": ("cut_reply", {"finish_reason": "length"}),
    "no end": ("cut_reply", {"finish_reason": ""}),
    "empty": ("empty_reply", {"response": reply(" \n")}),
    "no content": ("empty_reply", {"response": reply(None)}),
    "not whole": ("not_whole", {"opened": NOT_WHOLE}),
    "begins with a result": ("fragment", {"request": chat(TOOL)}),
    "begins with a result behind a system message": (
        "fragment",
        {"request": chat({"role": "system", "content": "Be brief."}, TOOL, USER)},
    ),
    "gap": ("unusable_attempt", {}),
    "failed": ("unusable_attempt", {}),
}


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Writer:
    model = chat_tokenizer.write(tmp_path_factory.mktemp("form") / "model", chat_tokenizer.TEMPLATE)
    return Writer(lambda: choose(model, "auto"), 4096, 4096)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_layouts_of_text_and_imitation_hold_whole_lessons_alone(
    data: st.DataObject, writer: Writer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source = WORLD.copy()
    folder = tmp_path_factory.mktemp("lessons")
    expected: dict[str, str] = {}
    for record, sample in source.rows("trajectories"):
        kind = data.draw(st.sampled_from(sorted(REASONS)))
        reason, changed = REASONS[kind]
        calls = source.calls(sample)
        responses = []
        for at, (place, event) in enumerate(calls):
            body = codec.decode_body("model_call", event["body"])
            body |= {"request": chat(USER), "request_base": None, "request_kept": {}, "response": reply("It rains.")}
            body |= {"trainable": False, "untrainable_reason": UNTRAINABLE, "finish_reason": "stop", "supersedes": None}
            body |= changed if at == len(calls) - 1 else {}
            responses.append(f"{body['response_id']}:{body['untrainable_reason']}")
            governance = {**event["governance"], "eligibility": "aggregate"}
            source.rewrite(place, {**event, "governance": governance, "body": codec.encode_body("model_call", body)})
        excluded = [*responses, *(["*:gap"] if kind == "gap" else [])]
        status = "failed" if kind == "failed" else "completed"
        source.rewrite(record, {**sample, "lineages": [], "excluded": excluded, "status": status})
        expected[sample["id"]] = reason
    history = History(source.bus, NS, POLICY)
    for name in TEXTS:
        out = folder / name
        summary = export_from(history, name, out, Selection(), "local")
        lines = (folder / f"{name}.refused.jsonl").read_bytes().splitlines() if summary.refused else []
        refused = {row["trajectory"]: row["reason"] for row in map(orjson.loads, lines)}
        assert refused == {id: reason for id, reason in expected.items() if reason}, name
        assert summary.exported == sum(not reason for reason in expected.values())
    for row in history.rows("trajectories"):
        events = [one for one in history.fetch("events", row.places("events")) if one is not None]
        calls_of_row = [one for one in events if one["kind"] == "model_call"]
        texts = writer.texts(row.record, calls_of_row)
        is_lesson = not expected[row["id"]]
        assert not is_lesson or (texts.replies > 0 and not texts.refusals), expected
        assert is_lesson or texts.replies < len(calls_of_row) or not calls_of_row
