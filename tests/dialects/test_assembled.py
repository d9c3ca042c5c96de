"""Calls of tools that upstreams stream in shapes of their own: each reaches the log and a translated client with its
own id, name and arguments."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.dialects.all import by_name, reader
from millrace.dialects.conversation import ToolUse
from millrace.dialects.translation.all import TRANSLATORS
from millrace.dialects.translation.base import Translator

each = pytest.mark.parametrize("to", TRANSLATORS, ids=lambda to: to.name)


class Said(NamedTuple):
    """A call that an upstream makes. `at`: the index that it writes, None where it writes none."""

    id: str
    name: str
    arguments: dict[str, Any]
    at: int | None
    as_object: bool
    pieces: int


ARGUMENTS = st.dictionaries(st.sampled_from("abc"), st.integers(0, 99) | st.text('xü"{}', max_size=3), max_size=3)


@st.composite
def calls(draw: st.DrawFn) -> list[Said]:
    count, placed = draw(st.integers(1, 4)), draw(st.sampled_from(("all at 0", "in order", "nowhere")))
    ids = draw(st.permutations([f"c{at}" for at in range(count)]))
    return [
        Said(
            ids[at],
            draw(st.sampled_from(("f", "g"))),
            draw(ARGUMENTS),
            {"all at 0": 0, "in order": at, "nowhere": None}[placed],
            draw(st.booleans()),
            draw(st.integers(1, 4)),
        )
        for at in range(count)
    ]


def pieces_of(call: Said) -> list[str]:
    text = json.dumps(call.arguments, ensure_ascii=False)
    size = max(1, -(-len(text) // call.pieces))
    return [text[at : at + size] for at in range(0, len(text), size)]


def chat(said: list[Said], *, with_ids: bool) -> list[dict[str, Any]]:
    deltas: list[dict[str, Any]] = []
    for call in said:
        at = {} if call.at is None else {"index": call.at}
        first, *rest = [call.arguments] if call.as_object or not with_ids else pieces_of(call)
        id = {"id": call.id} if with_ids else {}
        deltas.append({**at, **id, "type": "function", "function": {"name": call.name, "arguments": first}})
        deltas += [{**at, "function": {"arguments": piece}} for piece in rest]
    events: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": {"tool_calls": [delta]}}]} for delta in deltas]
    return [
        {**event, "id": "r"}
        for event in [*events, {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}]
    ]


def messages(said: list[Said], *, with_ids: bool) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = [{"type": "message_start", "message": {"id": "r", "usage": {}}}]
    for call in said:
        at = call.at or 0
        block: dict[str, Any] = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        if call.as_object:
            block["input"] = call.arguments
        events.append({"type": "content_block_start", "index": at, "content_block": block})
        for piece in () if call.as_object else pieces_of(call):
            delta = {"type": "input_json_delta", "partial_json": piece}
            events.append({"type": "content_block_delta", "index": at, "delta": delta})
        events.append({"type": "content_block_stop", "index": at})
    return [*events, {"type": "message_delta", "delta": {"stop_reason": "tool_use"}}, {"type": "message_stop"}]


def responses(said: list[Said], *, with_ids: bool) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = [{"type": "response.created", "response": {"id": "r"}}]
    for call in said:
        item = {"type": "function_call", "id": f"fc_{call.id}", "call_id": call.id, "name": call.name, "arguments": ""}
        place = {"output_index": call.at or 0}
        events.append({"type": "response.output_item.added", **place, "item": item})
        whole = call.arguments if call.as_object else json.dumps(call.arguments)
        events.append({"type": "response.output_item.done", **place, "item": {**item, "arguments": whole}})
    return [*events, {"type": "response.completed", "response": {"id": "r", "status": "completed"}}]


WRITE = {"chat": chat, "messages": messages, "responses": responses}


def logged(to: Translator, events: list[dict[str, Any]]) -> list[tuple[str, str, Any]]:
    """The calls as the log has them, read back as a start reads them."""
    one = reader(by_name(to.name))
    parts = one.assembler()
    for event in events:
        parts.feed(b"data: " + orjson.dumps(event) + b"\n\n")
    assert parts.unread == 0
    body, _ = one.whole(parts, b"")
    (reply,) = by_name(to.name).read(b'{"messages":[],"input":[]}', orjson.loads(body)).replies.values()
    functions = [(call["id"], call["function"]) for call in reply["tool_calls"]]
    return [(id, function["name"], json.loads(function["arguments"])) for id, function in functions]


def heard(to: Translator, events: list[dict[str, Any]]) -> list[tuple[str, str, Any]]:
    """The calls as a client of another API gets them."""
    listener, parts = to.listener(), list[Any]()
    for event in events:
        parts += listener.hear(b"data: " + orjson.dumps(event) + b"\n\n")
    parts += listener.end()
    return [(part.id, part.name, json.loads(part.arguments)) for part in parts if isinstance(part, ToolUse)]


@each
@settings(max_examples=150, deadline=None)
@given(said=calls())
def test_each_call_keeps_its_own_id_name_and_arguments(to: Translator, said: list[Said]) -> None:
    events = WRITE[to.name](said, with_ids=True)
    expected = [(call.id, call.name, call.arguments) for call in said]
    assert logged(to, events) == expected
    assert heard(to, events) == expected


@settings(max_examples=100, deadline=None)
@given(said=calls(), as_text=st.booleans())
def test_calls_without_ids_that_come_whole_are_not_merged(said: list[Said], as_text: bool) -> None:
    (to,) = [one for one in TRANSLATORS if one.name == "chat"]
    events = chat(said, with_ids=False)
    if as_text:
        for event in events[:-1]:
            function = event["choices"][0]["delta"]["tool_calls"][0]["function"]
            function["arguments"] = json.dumps(function["arguments"])
    expected = [("", call.name, call.arguments) for call in said]
    assert logged(to, events) == heard(to, events) == expected


@given(pieces=st.lists(st.sampled_from(('{"a', '": 1', "}", " ")), min_size=1, max_size=6), named_each=st.booleans())
def test_pieces_that_repeat_their_call_s_id_and_name_stay_one_call(pieces: list[str], named_each: bool) -> None:
    (to,) = [one for one in TRANSLATORS if one.name == "chat"]
    listener = to.listener()
    for piece in pieces:
        function = {"arguments": piece, **({"name": "f"} if named_each else {})}
        delta = {"tool_calls": [{"index": 0, "id": "c", "function": function}]}
        listener.hear(b"data: " + orjson.dumps({"choices": [{"delta": delta}]}) + b"\n\n")
    (call,) = listener.end()
    assert isinstance(call, ToolUse)
    assert call.arguments == "".join(pieces)
