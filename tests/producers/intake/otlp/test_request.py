"""A body of OTLP: the same in both forms, whatever is in it, and never anything but spans or a refusal."""

from __future__ import annotations

import base64
import gzip
import json
import zlib
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict, ParseDict
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from millrace.formats.spans.otlp_json import Span
from millrace.producers.intake.otlp import protobuf
from millrace.producers.intake.otlp.request import ENCODINGS, JSON, LOGS, PROTOBUF, TRACES, BadBody, read
from millrace.schemas import bounds
from tests.support.imported import GEN_AI, attributes, logged, traced
from tests.support.spans import Folded, a_call, a_span, an_evaluation, conversations

LIMIT = 16 << 20
KINDS: dict[str, Any] = {TRACES: ExportTraceServiceRequest, LOGS: ExportLogsServiceRequest}
LOOKED = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "look"}

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text() | st.just("[{"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NAMES = (
    *("gen_ai.operation.name", "gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.response.id"),
    *("gen_ai.conversation.id", "gen_ai.tool.name", "gen_ai.tool.call.id", "gen_ai.tool.definitions"),
    *("gen_ai.evaluation.score.value", "gen_ai.prompt.0.role", "gen_ai.completion.0.content", "llm.model_name"),
    *("openinference.span.kind", "input.value", "output.value", "llm.input_messages.0.message.role"),
    *("gen_ai.agent.name", "gen_ai.usage.input_tokens", "gen_ai.system_instructions", "event.name"),
)
WORDS = (
    *("chat", "execute_tool", "invoke_agent", "LLM", "TOOL", "AGENT", "gen_ai.evaluation.result", "gen_ai.choice"),
    json.dumps([{"role": "user", "parts": [{"type": "text", "content": "x"}]}]),
    json.dumps([{"role": "assistant", "parts": [{"type": "tool_call", "id": "c", "name": "n", "arguments": {}}]}]),
    json.dumps({"messages": [{"role": "user", "content": "q"}]}),
    json.dumps({"id": "r", "choices": [{"message": {"role": "assistant", "content": "a"}}]}),
)
known = st.dictionaries(st.sampled_from(NAMES), st.sampled_from(WORDS) | values, max_size=8)


def to_protobuf(value: Any) -> dict[str, Any]:
    """AnyValue, for the official parser."""
    match value:
        case None:
            return {}
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value if value == value and abs(value) != float("inf") else 0.5}
        case str():
            return {"stringValue": value}
        case list():
            return {"arrayValue": {"values": [to_protobuf(one) for one in value]}}
    return {"kvlistValue": {"values": [{"key": key, "value": to_protobuf(one)} for key, one in value.items()]}}


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, Any]:
    """(a signal, a request of it): ids and content as strange as the form allows."""
    signal = draw(st.sampled_from((TRACES, LOGS)))
    made = []
    for _ in range(draw(st.integers(0, 4))):
        said = [{"key": name, "value": to_protobuf(value)} for name, value in draw(known).items()]
        ids = {"traceId": draw(st.sampled_from(("", "AA==", "Cvdlh5Qc3BB4RkI1oQwDGQ=="))), "spanId": "AAAAAAAAAAE="}
        if signal == TRACES:
            events = [{"name": draw(st.sampled_from(WORDS)), "attributes": said}] if draw(st.booleans()) else []
            made.append({**ids, "attributes": said, "events": events, "startTimeUnixNano": "5"})
        else:
            body = to_protobuf(draw(values))
            made.append({**ids, "attributes": said, "eventName": draw(st.sampled_from(("", *WORDS))), "body": body})
    outer = {"resourceSpans": [{"scopeSpans": [{"spans": made}]}]}
    if signal == LOGS:
        outer = {"resourceLogs": [{"scopeLogs": [{"logRecords": made}]}]}
    return signal, ParseDict(outer, KINDS[signal]())


def in_json(message: Any) -> bytes:
    """A request as OTLP/JSON has it: ids in hex."""
    found = MessageToDict(message)

    def walk(value: Any) -> None:
        if isinstance(value, list):
            for one in value:
                walk(one)
        elif isinstance(value, dict):
            for name, one in value.items():
                if name in ("traceId", "spanId", "parentSpanId"):
                    value[name] = base64.b64decode(one).hex()
                else:
                    walk(one)

    walk(found)
    return json.dumps(found).encode()


def status(signal: str, media: str, encoding: str, data: bytes) -> int:
    """What the reading of a body comes to, as HTTP has it."""
    try:
        read(signal, media, encoding, data, LIMIT)
    except BadBody as error:
        return error.status
    return 200


def plain(spans: list[Span]) -> Any:
    return [(one.trace, one.id, one.name, one.start, one.attributes, list(one.events), one.log) for one in spans]


@given(requests())
def test_both_forms_say_the_same(given: tuple[str, Any]) -> None:
    signal, message = given
    first = read(signal, PROTOBUF, "", message.SerializeToString(), LIMIT)
    second = read(signal, JSON, "gzip", gzip.compress(in_json(message)), LIMIT)
    assert plain(first.spans) == plain(second.spans)
    assert first.refusals == second.refusals


@given(requests())
def test_what_was_taken_becomes_events_whatever_it_is(given: tuple[str, Any]) -> None:
    signal, message = given
    batch = read(signal, PROTOBUF, "", message.SerializeToString(), LIMIT)
    made = Folded()
    made.took(batch.spans, 1)
    made.close(20)
    assert not [reason for reason in made.assembler.passed if "bad_" in reason or "bounds" in reason]


@given(st.binary(max_size=300), st.sampled_from((TRACES, LOGS)), st.sampled_from((JSON, PROTOBUF)))
def test_arbitrary_bytes_are_spans_or_a_refusal(data: bytes, signal: str, media: str) -> None:
    for encoding in ("", *ENCODINGS):
        assert status(signal, media, encoding, data) in (200, 400, 413)


@given(
    values.map(json.dumps) | st.dictionaries(st.sampled_from(("resourceSpans", "resourceLogs")), values).map(json.dumps)
)
def test_arbitrary_json_is_spans_or_a_refusal(text: str) -> None:
    for signal in (TRACES, LOGS):
        assert status(signal, JSON, "", text.encode()) in (200, 400)


@given(requests(), st.integers(0, 400), st.binary(min_size=1, max_size=4))
def test_a_damaged_message_is_spans_or_a_refusal(given: tuple[str, Any], at: int, patch: bytes) -> None:
    signal, message = given
    data = bytearray(message.SerializeToString())
    data[at : at + len(patch)] = patch
    assert status(signal, PROTOBUF, "", bytes(data)) in (200, 400)


@given(conversations())
def test_good_spans_are_all_taken(given: list[Any]) -> None:
    spans = [one for one in given if "startTimeUnixNano" in one]
    batch = read(TRACES, JSON, "", json.dumps(traced(spans)).encode(), LIMIT)
    assert (len(batch.spans), batch.refusals) == (len(spans), {})


CUT = GEN_AI | {"gen_ai.input.messages": '[{"role": "user", "par'}
BAD: dict[str, dict[str, Any]] = {
    "bad_message": a_span(2, CUT),
    "out_of_bounds": a_span(2, LOOKED | {"gen_ai.tool.name": "x" * 2000}),
    "bad_id": a_span(2, GEN_AI) | {"spanId": "00" * 8},
    "bad_reward": a_span(
        2,
        GEN_AI,
        events=[{"name": "gen_ai.evaluation.result", "attributes": attributes({"gen_ai.evaluation.score.value": 1e9})}],
    ),
    "bad_source": a_span(
        2,
        GEN_AI,
        events=[
            {
                "name": "gen_ai.evaluation.result",
                "attributes": attributes(
                    {"gen_ai.evaluation.name": "verifier\x1fx", "gen_ai.evaluation.score.value": 1.0}
                ),
            }
        ],
    ),
    "too_many_values": a_span(
        2,
        a_call("q", "[" * 100, "r")
        | {
            "gen_ai.output.messages": json.dumps(
                [{"role": "assistant", "content": [json.loads('{"type":"x","y":' * 70 + "1" + "}" * 70)]}]
            )
        },
    ),
}


@pytest.mark.parametrize("code", BAD)
def test_one_bad_span_is_refused_and_disturbs_no_other(code: str) -> None:
    good = [a_span(1, a_call("q", "a", "r1")), a_span(3, a_call("q", "a", "r3"))]
    batch = read(TRACES, JSON, "", json.dumps(traced([good[0], BAD[code], good[1]])).encode(), LIMIT)
    assert [one.id for one in batch.spans] == [one["spanId"] for one in good]
    assert batch.refusals == {code: 1}
    assert batch.detail.startswith(code)


def test_a_bad_log_record_is_refused_too() -> None:
    records = [an_evaluation(1, 1e9), an_evaluation(2, 0.5)]
    batch = read(LOGS, JSON, "", json.dumps(logged(records)).encode(), LIMIT)
    assert (len(batch.spans), batch.refusals) == (1, {"bad_reward": 1})


@pytest.mark.parametrize("compress", [gzip.compress, zlib.compress])
def test_a_bomb_is_not_uncompressed(compress: Any) -> None:
    with pytest.raises(BadBody) as refused:
        read(TRACES, PROTOBUF, "gzip", compress(b"\0" * (LIMIT + 1)), LIMIT)
    assert refused.value.status == 413
    members = compress(b"\0" * (LIMIT // 2)) * 3
    with pytest.raises(BadBody) as refused:
        read(TRACES, PROTOBUF, "gzip", members, LIMIT)
    assert refused.value.status == 413


def test_many_values_and_levels_are_refused_before_they_are_objects() -> None:
    def field(number: int, data: bytes) -> bytes:
        size, out = len(data), bytearray([number << 3 | 2])
        while True:
            out.append(size & 0x7F | (0x80 if size > 0x7F else 0))
            size >>= 7
            if not size:
                return bytes(out) + data

    empty = b"\x4a\x00" * (bounds.OTLP_VALUES + 1)  # attributes of a span
    many = field(1, field(2, field(2, empty)))
    value = b""
    for _ in range(bounds.OTLP_DEPTH):
        value = field(5, field(1, value))
    deep = field(1, field(2, field(2, field(9, field(2, value)))))
    for body in (many, deep):
        with pytest.raises(BadBody) as refused:
            read(TRACES, PROTOBUF, "", body, LIMIT)
        assert refused.value.status == 400
    wide = b'{"resourceSpans":[' + b"[]," * bounds.OTLP_VALUES + b"1]}"
    nested = b'{"resourceSpans":' + b"[" * 1000 + b"]" * 1000 + b"}"
    for body in (wide, nested):
        with pytest.raises(BadBody) as refused:
            read(TRACES, JSON, "", body, LIMIT)
        assert refused.value.status == 400


@given(st.lists(st.integers(1, 50), min_size=1, max_size=4))
def test_fields_are_counted_as_they_are(sizes: list[int]) -> None:
    message = ExportTraceServiceRequest()
    count = 0
    for size in sizes:
        span = message.resource_spans.add().scope_spans.add().spans.add()
        for number in range(size):
            span.attributes.add(key=f"k{number}").value.string_value = "v"
        count += 3 + 4 * size
    data = message.SerializeToString()
    protobuf.measure(data, ExportTraceServiceRequest.DESCRIPTOR, count)
    with pytest.raises(protobuf.TooMany):
        protobuf.measure(data, ExportTraceServiceRequest.DESCRIPTOR, count - 1)
