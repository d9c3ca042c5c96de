"""What a tool's schema marks as personal is labelled in calls of tools, and taken out where the tenant says so."""

from __future__ import annotations

import orjson
import pytest

from millrace.infra.config import Governance, Tenant
from millrace.schemas import codec
from millrace.streams.refine import custody, personal
from millrace.streams.refine.detectors.vectorscan import Vectorscan
from millrace.streams.refine.leaves import Buffer
from millrace.streams.refine.stage import Refine
from millrace.streams.refine.strings import String
from millrace.testing.events import Episode
from tests.support.folding import Bench, of

SCHEMA = {"type": "object", "properties": {"whom": {"type": "string", "x-personal": True}, "what": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "send", "parameters": SCHEMA}}]


def values(document: object) -> list[bytes]:
    buffer = Buffer()
    buffer.add([String(("body", "request"), orjson.dumps(document), True)])
    return [buffer.text[hit.start : hit.end] for hit in personal.hits(buffer, personal.fields_of(buffer))]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ({"arguments": '{"whom": "Zed", "what": "hello"}'}, [b"Zed"]),
        (
            {"arguments": '{"whom": {"a": "Zed", "b": ["Zoe", 123456789012]}, "c": "x"}'},
            [b"Zed", b"Zoe", b"123456789012"],
        ),
        ({"input": {"what": "hello", "whom": "Zed"}}, [b"Zed"]),
        ({"input": {"whom": ["Zed", {"x": "Zoe"}], "what": "hello"}}, [b"Zed", b"Zoe"]),
        ({"arguments": "{whom"}, []),
        ({"input": {"what": "whom"}}, []),
    ],
)
def test_the_values_of_a_marked_field_are_labelled_and_its_schema_is_not(call, expected):
    assert values({"tools": TOOLS, "messages": [{"role": "assistant", "tool_calls": [call]}]}) == expected
    assert values({"messages": [{"role": "assistant", "tool_calls": [call]}]}) == []


@pytest.mark.parametrize("remove", [(), ("personal",)])
def test_a_mark_holds_for_the_calls_that_follow(remove):
    rules = Governance(tenants={"local": Tenant(remove=remove)})
    bench, episode = Bench(Refine(rules, [Vectorscan()], slots=1), clock=1), Episode("e")
    request = orjson.dumps({"tools": TOOLS, "messages": [{"role": "user", "content": "go"}]})
    body = {"call_id": "c", "name": "send", "arguments": '{"whom": "Zed", "what": "hi"}', "response_id": None}
    for event in (episode.start(), episode.call("r", request=request), episode.event("tool_call", body)):
        emits = bench.record("raw", episode.key, "Event", event)
    (event,) = of(emits, "Event")
    arguments = orjson.loads(codec.decode_body("tool_call", event["body"])["arguments"])
    assert arguments == {"whom": "[REDACTED:personal]" if remove else "Zed", "what": "hi"}
    assert event["governance"]["counts"] == {"personal": 1}


def test_a_trajectory_without_marks_keeps_the_state_that_it_had():
    state = custody.begin(Episode("e").start())
    assert custody.mark(state, ()) is state
    assert custody.mark(state, {"b", "a"})["personal"] == ["a", "b"]
