"""OTLP of GenAI in all the forms that instrumentations write: the same conversation, whichever it is."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from millrace.formats.files import reader
from millrace.formats.layouts.otlp import OtlpReader
from tests.support.imported import (
    AT,
    EVALUATED,
    FIRST,
    GEN_AI,
    LOOKED,
    OTHER,
    SECOND,
    SPANS,
    TRACE,
    any_value,
    attributes,
    bodies,
    decoded,
    logged,
    read,
    said,
    span,
    text,
    traced,
    write,
)

ROLES = ["user", "assistant", "tool"]
CONTENTS = ["What is the weather?", "", "rain"]
TOLD = [
    ("gen_ai.user.message", {"content": "What is the weather?"}),
    ("gen_ai.assistant.message", {"tool_calls": [{"id": "c1", "function": {"name": "look", "arguments": "{}"}}]}),
    ("gen_ai.tool.message", {"id": "c1", "content": "rain"}),
    ("gen_ai.choice", {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "It rains."}}),
]
DETAILS = {name: value for name, value in SECOND.items() if "messages" in name}
FLAT = {
    "gen_ai.prompt.0.role": "user",
    "gen_ai.prompt.0.content": "What is the weather?",
    "gen_ai.prompt.1.role": "assistant",
    "gen_ai.prompt.1.tool_calls.0.id": "c1",
    "gen_ai.prompt.1.tool_calls.0.name": "look",
    "gen_ai.prompt.1.tool_calls.0.arguments": "{}",
    "gen_ai.prompt.2.role": "tool",
    "gen_ai.prompt.2.tool_call_id": "c1",
    "gen_ai.prompt.2.content": "rain",
    "gen_ai.completion.0.role": "assistant",
    "gen_ai.completion.0.content": "It rains.",
    "gen_ai.completion.0.finish_reason": "stop",
}


def event(name: str, known: dict[str, Any], at: int) -> dict[str, Any]:
    return {"name": name, "timeUnixNano": str(AT * 1000 + at), "attributes": attributes(known)}


def log(name: str, body: dict[str, Any], at: int) -> dict[str, Any]:
    ids = {"traceId": TRACE, "spanId": f"{30:016x}"}
    return {**ids, "eventName": name, "timeUnixNano": str(AT * 1000 + at), "body": any_value(body)}


def written(body: dict[str, Any]) -> dict[str, Any]:
    """As attributes of a span's event, which take no structure."""
    return {name: value if isinstance(value, str | int) else json.dumps(value) for name, value in body.items()}


FORMS: dict[str, list[dict[str, Any]]] = {
    "attributes": [traced([span("chat m", 30, GEN_AI | DETAILS)])],
    "details": [
        traced([span("chat", 30, GEN_AI, events=[event("gen_ai.client.inference.operation.details", DETAILS, 0)])])
    ],
    "span events": [
        traced([span("chat", 30, GEN_AI, events=[event(n, written(b), at) for at, (n, b) in enumerate(TOLD)])])
    ],
    "events as text": [
        traced(
            [
                span(
                    "chat",
                    30,
                    GEN_AI,
                    events=[event(n, {"gen_ai.event.content": json.dumps(b)}, at) for at, (n, b) in enumerate(TOLD)],
                )
            ]
        )
    ],
    "log records": [
        logged([log(n, b, at) for at, (n, b) in enumerate(TOLD)]),
        traced([span("chat", 30, GEN_AI)]),
    ],
    "flat": [traced([span("openai.chat", 30, FLAT | {"gen_ai.request.model": "m"})])],
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_says_the_same(form: str, tmp_path: Path) -> None:
    found, refused = read(write(tmp_path / "spans", FORMS[form]))
    assert refused == []
    ((_, records),) = found
    (call,) = bodies(records, "model_call")
    asked, answer = json.loads(call["request"]), json.loads(call["response"])
    assert [one["role"] for one in asked["messages"]] == ROLES
    assert [one["content"] for one in asked["messages"]] == CONTENTS
    assert asked["messages"][1]["tool_calls"][0]["function"]["name"] == "look"
    assert asked["messages"][2]["tool_call_id"] == "c1"
    assert asked["model"] == "m"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "It rains."}
    assert call["finish_reason"] == "stop"


def test_the_order_of_lines_and_spans_means_nothing(tmp_path: Path) -> None:
    first: list[Any] = []
    for seed in range(6):
        spans = list(SPANS)
        random.Random(seed).shuffle(spans)
        cut = seed % len(spans)
        found, _ = read(write(tmp_path / "spans", [traced(spans[:cut]), traced(spans[cut:])]))
        first = first or [records for _, records in found]
        assert [records for _, records in found] == first


def test_spans_of_one_conversation_are_one_episode_and_traces_else(tmp_path: Path) -> None:
    def both(first: dict[str, Any], second: dict[str, Any]) -> Any:
        lines = [traced([span("chat", 10, FIRST | first)]), traced([span("chat", 30, SECOND | second, trace=OTHER)])]
        found, refused = read(write(tmp_path / "spans", lines))
        assert refused == []
        return [len(bodies(records, "model_call")) for _, records in found]

    assert both({}, {}) == [1, 1]
    named = {"gen_ai.conversation.id": "c"}
    assert both(named, named) == [2]
    assert both(named, {}) == [1, 1]


def test_a_tool_that_no_reply_asked_for_is_a_call_of_its_own(tmp_path: Path) -> None:
    alone = {name: value for name, value in LOOKED.items() if name != "gen_ai.tool.call.id"}
    failed = span("execute_tool look", 20, alone, status={"code": 2})
    ((_, records),), _ = read(write(tmp_path / "spans", [traced([span("chat", 30, SECOND), failed])]))
    kinds = [event["kind"] for event, _ in decoded(records)]
    assert kinds == ["episode_started", "tool_call", "tool_result", "model_call", "episode_ended"]
    (answer,) = bodies(records, "tool_result")
    assert (answer["status"], answer["name"], answer["latency_us"]) == ("error", "look", 5_000)
    assert bodies(records, "episode_ended")[0]["status"] == "failed"


def test_answers_of_tools_without_a_span_are_read_out_of_the_next_call(tmp_path: Path) -> None:
    ((_, records),), _ = read(write(tmp_path / "spans", [traced([span("chat", 10, FIRST), span("chat", 30, SECOND)])]))
    kinds = [event["kind"] for event, _ in decoded(records)][1:-1]
    assert kinds == ["model_call", "tool_call", "tool_result", "model_call"]


def test_two_spans_of_one_reply_are_one_call(tmp_path: Path) -> None:
    path = write(tmp_path / "spans", [traced([span("chat", 10, FIRST), span("anthropic.create", 11, FIRST)])])
    layout = OtlpReader()
    (group,) = layout.groups(reader(path), lambda number, error: None, lambda done, total: None)
    assert len(group.episodes[0].steps) == 1
    assert layout.omissions == {"second span of a call": 1}


def test_an_evaluation_may_name_a_reply_or_lie_on_its_span(tmp_path: Path) -> None:
    late = {"gen_ai.evaluation.name": "late", "gen_ai.evaluation.score.value": 1, "gen_ai.response.id": "r1"}
    label = {"gen_ai.evaluation.name": "words", "gen_ai.evaluation.score.label": "good"}
    records = [log("gen_ai.evaluation.result", one, 50) for one in (late, label)]
    lines = [traced([span("chat", 10, FIRST), span("chat", 30, SECOND, events=[EVALUATED])]), logged(records)]
    ((_, found),), refused = read(write(tmp_path / "spans", lines))
    assert refused == []
    calls, rewards = bodies(found, "model_call"), bodies(found, "reward")
    assert [(one["source"], one["value"], one["target_kind"]) for one in rewards] == [
        ("import:judge", 0.75, "turn"),
        ("import:late", 1.0, "turn"),
    ]
    assert [one["target"] for one in rewards] == [calls[1]["response_id"], calls[0]["response_id"]]


def test_what_cannot_be_an_episode_is_refused_by_name(tmp_path: Path) -> None:
    cut = GEN_AI | {"gen_ai.input.messages": '[{"role": "user", "par'}
    lines = [
        traced([span("chat", 10, GEN_AI)]),
        {"other": 1},
        traced([span("chat", 10, cut, trace=OTHER)]),
        logged([{"traceId": "2c" * 16, "eventName": "gen_ai.user.message"}]),
        traced([span("GET", 1, {}, trace="3d" * 16)]),
    ]
    found, refused = read(write(tmp_path / "spans", lines))
    assert found == []
    assert [(number, error.code) for number, error in refused] == [
        (1, "no_content"),
        (2, "not_otlp"),
        (3, "bad_message"),
        (4, "no_spans"),
    ]


def test_what_the_sdk_of_opentelemetry_sends_is_read(tmp_path: Path) -> None:
    """Spans of the real SDK through the real encoder, written as the collector's file exporter does."""
    import base64

    from google.protobuf.json_format import MessageToDict
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    tracer = provider.get_tracer("test")
    with tracer.start_as_current_span("invoke_agent shop", attributes={"gen_ai.operation.name": "invoke_agent"}):
        with tracer.start_as_current_span("chat m", attributes={**FIRST}):
            pass
        with tracer.start_as_current_span("execute_tool look", attributes={**LOOKED}) as tool:
            tool.add_event("gen_ai.other", {"n": 1})
        output = json.dumps([said("assistant", text("It rains."))])
        asked = json.dumps([said("user", text("What is the weather?"))])
        known = {**GEN_AI, "gen_ai.input.messages": asked, "gen_ai.output.messages": output}
        with tracer.start_as_current_span("chat m", attributes=known):
            pass
    line = MessageToDict(encode_spans(kept.get_finished_spans()))
    for resource in line["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for one in scope["spans"]:
                for name in ("traceId", "spanId", "parentSpanId"):
                    if name in one:
                        one[name] = base64.b64decode(one[name]).hex()
    ((_, records),), refused = read(write(tmp_path / "spans", [line]))
    assert refused == []
    kinds = [event["kind"] for event, _ in decoded(records)]
    assert kinds[1:-1] == ["model_call", "tool_call", "tool_result", "model_call"]
    assert bodies(records, "episode_ended")[0]["output"] == "It rains."
