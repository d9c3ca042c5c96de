"""Of whatever arrives a dialect makes an Ask that messages can be made of, or refuses it; nothing else is raised."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.dialects import match_keys
from millrace.dialects.all import CHAT, COMPLETIONS, DIALECTS, MESSAGES, RESPONSES, read
from millrace.dialects.base import Dialect
from millrace.dialects.chat.request import ChatRequest
from millrace.dialects.completions.dialect import CompletionsRequest
from millrace.dialects.conversation import ToolUse, messages_of, prompt_message
from millrace.dialects.errors import ApiError
from millrace.dialects.messages.dialect import _input
from millrace.dialects.messages.request import MessagesRequest
from millrace.dialects.responses.request import ResponsesRequest
from millrace.schemas import bounds

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
words = st.sampled_from(
    (
        "text", "image", "image_url", "thinking", "redacted_thinking", "tool_use", "tool_result", "user", "assistant",
        "system", "tool", "auto", "none", "any", "custom", "function", "json_schema", "x" * (bounds.NAME_BYTES + 1),
    )
)  # fmt: skip
names = st.sampled_from(
    (
        "type", "text", "role", "content", "id", "name", "input", "thinking", "signature", "tool_use_id", "function",
        "arguments", "tool_calls", "tool_call_id", "input_schema", "description", "format", "edits", "keep", "user_id",
    )
)  # fmt: skip
values = st.recursive(
    scalars | words,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=5),
    max_leaves=12,
)
blocks = st.lists(
    st.fixed_dictionaries({"type": words}, optional=dict.fromkeys(("text", "id", "name", "input"), values))
    | st.fixed_dictionaries({"type": words, "content": values, "tool_use_id": scalars, "thinking": scalars}),
    max_size=4,
)
messages = st.lists(
    st.fixed_dictionaries({"role": words, "content": st.text(max_size=8) | blocks | values}), max_size=4
) | values  # fmt: skip
kinds = st.sampled_from(("message", "function_call", "function_call_output", "reasoning", "item_reference", "image"))
roles = st.sampled_from(("user", "assistant", "developer", "tool"))
texts = st.text(max_size=8)
spoken = st.lists(
    st.fixed_dictionaries({"type": st.sampled_from(("input_text", "output_text", "refusal", "input_image"))}, optional={
        "text": texts | values, "refusal": texts}),
    max_size=3,
)  # fmt: skip
items = texts | st.lists(
    st.fixed_dictionaries({}, optional={
        "type": kinds | values, "role": roles | values, "content": texts | spoken | values, "call_id": texts | values,
        "name": texts | words, "arguments": texts | values, "output": texts | spoken | values,
        "summary": spoken | values,
    }),
    max_size=5,
)  # fmt: skip
FIELDS = {
    CHAT: [field.name for field in msgspec.structs.fields(ChatRequest)],
    MESSAGES: [field.name for field in msgspec.structs.fields(MessagesRequest)],
    COMPLETIONS: [field.name for field in msgspec.structs.fields(CompletionsRequest)],
    RESPONSES: [field.name for field in msgspec.structs.fields(ResponsesRequest)],
}


def requests(dialect: Dialect) -> st.SearchStrategy[dict[str, Any]]:
    """Requests of the dialect's own fields, with values that are its own now and then."""
    more = st.dictionaries(st.sampled_from(FIELDS[dialect]), values, max_size=3)
    if dialect is RESPONSES:
        return st.builds(lambda items, more: {"model": "m", "input": items, **more}, items, more)
    if dialect is COMPLETIONS:
        prompts = st.text(max_size=8) | st.lists(st.integers(-1, 9), max_size=4) | values
        return st.builds(lambda prompt, more: {"model": "m", "prompt": prompt, **more}, prompts, more)
    return st.builds(
        lambda messages, more: {"model": "m", "max_tokens": 5, "messages": messages, **more}, messages, more
    )


def understood(dialect: Dialect, body: bytes) -> None:
    with suppress(ApiError):
        asked = dialect.parse(body)
        found = messages_of(asked.turns) if asked.prompt is None else [prompt_message(asked.prompt)]
        match_keys.chain(found, asked.tools)
        assert all(isinstance(message["content"], str) for message in found)
        assert all(isinstance(call["id"], str) for message in found for call in message.get("tool_calls", ()))


def test_every_dialect_is_tried() -> None:
    assert set(FIELDS) == set(DIALECTS)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@settings(max_examples=400, deadline=None)
@given(st.data())
def test_a_request_is_understood_or_refused(dialect: Dialect, data: st.DataObject) -> None:
    understood(dialect, json.dumps(data.draw(requests(dialect))).encode())


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@settings(max_examples=200, deadline=None)
@given(body=st.binary(max_size=60) | values.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_understood_or_refused(dialect: Dialect, body: bytes) -> None:
    understood(dialect, body)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), response=values)
def test_a_record_of_any_shape_is_read_or_refused(data: st.DataObject, response: Any) -> None:
    dialect = data.draw(st.sampled_from(DIALECTS))
    shaped = (
        st.just(response)
        | st.builds(lambda content: {"type": "message", "content": content}, blocks | values)
        | st.builds(lambda choices: {"object": "text_completion", "choices": choices}, blocks | values)
        | st.builds(lambda output: {"object": "response", "output": output}, items | values)
    )
    with suppress(ApiError, ValueError):
        request = json.dumps(data.draw(requests(dialect))).encode()
        read(request, json.dumps(data.draw(shaped)).encode())


ARGUMENTS = (
    '{"a":  1.0}',
    "{}",
    "[1, 2]",
    '"text"',
    "not json",
    "",
    "NaN",
    "[" * 100 + "]" * 100,
    "{",
    " 7 ",
    "1" * 400,
)


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_a_call_of_any_arguments_is_the_same_when_it_is_echoed(arguments: str) -> None:
    """As a client of Messages reads the input of a tool and sends it back."""
    block = {"type": "tool_use", "id": "c", "name": "f", "input": json.loads(_input(ToolUse("c", "f", arguments)))}
    given = {"model": "m", "max_tokens": 5, "messages": [{"role": "assistant", "content": [block]}]}
    given["messages"].append({"role": "user", "content": "so"})
    (echoed, _) = messages_of(MESSAGES.parse(orjson.dumps(given)).turns)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    kept = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert match_keys.message_key(echoed) == match_keys.message_key(kept)
