"""Spans of OpenInference and openllmetry say what the same call says in the words of GenAI."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.formats.episodes.episode import ReplyStep, ToolAnswerStep, ToolUseStep
from millrace.formats.spans.api_calls import raw_call
from millrace.formats.spans.conventions import normal
from millrace.formats.spans.conversation import SpanConversation
from millrace.formats.spans.otlp_json import Span, spans
from tests.support.imported import span, traced

CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"z":  1.0}'}}
CHAT = (
    {
        "model": "m",
        "tools": [{"type": "function", "function": {"name": "look"}}],
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Rain?"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "yes"},
        ],
    },
    {
        "id": "r1",
        "model": "m-1",
        "choices": [
            {
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": "It rains.", "reasoning_content": "Hm."},
            }
        ],
    },
)
MESSAGES = (
    {
        "model": "m",
        "system": [{"type": "text", "text": "Be brief."}],
        "tools": [{"name": "look", "input_schema": {}}],
        "messages": [
            {"role": "user", "content": "Rain?"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {"z": 1.0}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "yes"}]},
        ],
    },
    {
        "id": "r1",
        "model": "m-1",
        "role": "assistant",
        "stop_reason": "end_turn",
        "content": [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "It rains."}],
    },
)
RESPONSES = (
    {
        "model": "m",
        "instructions": "Be brief.",
        "tools": [{"type": "function", "name": "look", "parameters": {}}],
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Rain?"}]},
            {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "look", "arguments": '{"z":  1.0}'},
            {"type": "function_call_output", "call_id": "c1", "output": "yes"},
        ],
    },
    {
        "id": "r1",
        "model": "m-1",
        "output": [
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "It rains."}]},
        ],
    },
)
FLAT = {
    "llm.model_name": "m",
    "llm.token_count.prompt": 7,
    "llm.input_messages.0.message.role": "system",
    "llm.input_messages.0.message.content": "Be brief.",
    "llm.input_messages.1.message.role": "user",
    "llm.input_messages.1.message.contents.0.message_content.type": "text",
    "llm.input_messages.1.message.contents.0.message_content.text": "Rain?",
    "llm.input_messages.2.message.role": "assistant",
    "llm.input_messages.2.message.tool_calls.0.tool_call.id": "c1",
    "llm.input_messages.2.message.tool_calls.0.tool_call.function.name": "look",
    "llm.input_messages.2.message.tool_calls.0.tool_call.function.arguments": '{"z":  1.0}',
    "llm.input_messages.3.message.role": "tool",
    "llm.input_messages.3.message.tool_call_id": "c1",
    "llm.input_messages.3.message.content": "yes",
    "llm.output_messages.0.message.role": "assistant",
    "llm.output_messages.0.message.content": "It rains.",
    "llm.tools.0.tool.json_schema": json.dumps({"type": "function", "function": {"name": "look"}}),
    "llm.invocation_parameters": json.dumps({"temperature": 0.5}),
}


def told(*given: dict[str, Any]) -> list[Any]:
    """The steps of spans with these attributes."""
    found = [span("x", number + 1, known) for number, known in enumerate(given)]
    return list(SpanConversation([normal(one) for one in spans(traced(found))], Counter()).episode().steps)


def raw(pair: tuple[Any, Any]) -> dict[str, Any]:
    asked, replied = pair
    return {
        "openinference.span.kind": "LLM",
        "input.value": json.dumps(asked),
        "output.value": json.dumps(replied),
        "llm.output_messages.0.message.content": "not this",
    }


@pytest.mark.parametrize("form", ["chat", "messages", "responses", "flat"])
def test_every_form_of_a_call_says_the_same(form: str) -> None:
    pairs = {"chat": CHAT, "messages": MESSAGES, "responses": RESPONSES}
    known = {"openinference.span.kind": "LLM", **FLAT} if form == "flat" else raw(pairs[form])
    (reply,) = told(known)
    assert isinstance(reply, ReplyStep)
    assert [(one["role"], one["content"]) for one in reply.messages] == [
        ("system", "Be brief."),
        ("user", "Rain?"),
        ("assistant", ""),
        ("tool", "yes"),
    ]
    (call,) = reply.messages[2]["tool_calls"]
    assert (call["id"], call["function"]["name"]) == ("c1", "look")
    assert json.loads(call["function"]["arguments"]) == {"z": 1.0}
    if form != "messages":
        assert call["function"]["arguments"] == '{"z":  1.0}'
    assert reply.message["content"] == "It rains."
    assert [tool["function"]["name"] for tool in reply.tools] == ["look"]
    if form == "flat":
        assert (reply.model, reply.prompt_tokens, reply.temperature) == ("m", 7, 0.5)
    else:
        assert (reply.model, reply.response_id, reply.message["reasoning_content"]) == ("m-1", "r1", "Hm.")
        assert "finish_reason" not in reply.message


def test_tools_and_agents_of_other_conventions() -> None:
    chat = raw(CHAT)
    tool = {"openinference.span.kind": "TOOL", "tool.name": "look", "tool_call.id": "c9", "output.value": "rain"}
    entity = {"traceloop.span.kind": "tool", "traceloop.entity.name": "look", "traceloop.entity.output": "sun"}
    steps = told(chat, tool, entity, {"openinference.span.kind": "CHAIN"})
    assert [type(one) for one in steps] == [ReplyStep, ToolUseStep, ToolAnswerStep, ToolUseStep, ToolAnswerStep]
    assert [one.content for one in steps if isinstance(one, ToolAnswerStep)] == ["rain", "sun"]


def test_what_a_span_says_in_the_words_of_genai_stays() -> None:
    known = {"gen_ai.operation.name": "chat", "openinference.span.kind": "TOOL"}
    (one,) = spans(traced([span("x", 1, known)]))
    assert normal(one) is one


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                (
                    "messages",
                    "choices",
                    "message",
                    "content",
                    "role",
                    "input",
                    "output",
                    "type",
                    "text",
                    "tool_calls",
                    "id",
                )
            )
            | st.sampled_from(("tool_use", "function_call", "reasoning", "summary", "system", "tools", "name")),
            inner | st.sampled_from(("message", "text", "tool_use", "tool_result", "function_call", "reasoning")),
            max_size=5,
        )
    ),
    max_leaves=20,
)


@given(values, values)
def test_any_json_is_a_call_or_nothing(asked: Any, replied: Any) -> None:
    found = raw_call(asked, replied)
    assert not found or (found["gen_ai.input.messages"] and found["gen_ai.output.messages"])


@given(st.dictionaries(st.sampled_from([*FLAT, "input.value", "output.value", "session.id"]), values, max_size=8))
def test_any_attributes_are_read(known: dict[str, Any]) -> None:
    for kind in ("LLM", "TOOL", "AGENT", "CHAIN", "?"):
        given_span = Span("t", "i", "", "", 1, 2, False, {"openinference.span.kind": kind, **known}, [], {})
        assert set(known) <= set(normal(given_span).attributes)
