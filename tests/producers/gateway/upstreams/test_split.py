"""A reply that is streamed, however it is cut into pieces, is recorded as the same reply that came whole."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.dialects.all import as_chat
from millrace.dialects.answers import reply
from millrace.dialects.dialogue import canonical, reply_of
from millrace.dialects.reading.pieces import FIELDS, Pieces
from millrace.schemas import bounds
from tests.support.upstream_answers import READERS, REQUEST

texts = st.text(st.characters(codec="utf-8"), max_size=12)
calls = st.lists(texts, max_size=3).map(
    lambda said: [
        {"id": f"c{at}", "type": "function", "function": {"name": "f", "arguments": one}} for at, one in enumerate(said)
    ]
)
optional: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("reasoning_content", "reasoning", "refusal", "a_new_text"), texts),
    "tool_calls": calls,
    "function_call": st.fixed_dictionaries({"name": st.just("f"), "arguments": texts}),
    "audio": st.fixed_dictionaries({"id": st.just("a"), "data": texts, "transcript": texts}),
    "annotations": st.lists(st.fixed_dictionaries({"type": st.just("url_citation"), "title": texts}), max_size=3),
    "score": st.integers(0, 9),
}
messages = st.fixed_dictionaries({"role": st.just("assistant"), "content": texts}, optional=optional)
"""what a provider's message may hold"""


@st.composite
def pieces_of(draw: st.DrawFn, text: str) -> list[str]:
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=3)))
    return [text[at:to] for at, to in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@st.composite
def deltas(draw: st.DrawFn, message: dict[str, Any]) -> list[dict[str, Any]]:
    """The deltas in which a server may send it."""
    out: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    for name, value in message.items():
        match name, value:
            case "role", _:
                continue
            case "tool_calls", _:
                for at, call in enumerate(value):
                    begun = {**call, "function": {"name": "f", "arguments": ""}}
                    out.append({"tool_calls": [{"index": at, **begun}]})
                    for piece in draw(pieces_of(call["function"]["arguments"])):
                        out.append({"tool_calls": [{"index": at, "function": {"arguments": piece}}]})
            case _, str():
                out += [{name: piece, "role": "assistant"} for piece in draw(pieces_of(value))]
            case _, dict():
                for field, text in value.items():
                    whole = field in ("id", "name")
                    out += [{name: {field: piece}} for piece in ([text] if whole else draw(pieces_of(text)))]
            case _, list():
                out += [{name: [item]} for item in value]
            case _:
                out.append({name: value})
    return out


@settings(max_examples=150, database=None, deadline=None)
@given(messages.flatmap(lambda message: st.tuples(st.just(message), deltas(message))), st.integers(1, 200))
def test_chat(said: tuple[dict[str, Any], list[dict[str, Any]]], part: int) -> None:
    message, sent = said
    plain = orjson.dumps({"id": "c", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})
    chunks = [{"id": "c", "choices": [{"index": 0, "delta": delta}]} for delta in sent]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    raw = b"".join(b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks)
    events = READERS["chat"].assembler()
    for at in range(0, len(raw), part):
        events.feed(raw[at : at + part])
    response, streamed = READERS["chat"].whole(events, b"")
    whole = READERS["chat"].answer(plain, b"")
    assert events.unread == 0
    assert whole is not None
    assert streamed is not None
    assert streamed.answer.choices == whole.answer.choices
    assert streamed.digests == whole.digests
    one, other = reply_of(plain, 0), reply_of(response, 0)
    assert canonical(one) == canonical(other)
    told = {name: value for name, value in (one or {}).items() if value not in ("", [])}
    assert {name: (other or {}).get(name) for name in told} == told, "no field is lost"


def test_thoughts_among_the_parts_of_a_message() -> None:
    thought = {"type": "thinking", "thinking": [{"type": "text", "text": "so"}]}
    message = {"role": "assistant", "content": [thought, {"type": "text", "text": "x"}]}
    events = READERS["chat"].assembler()
    for part in message["content"]:
        events.take({"id": "c", "choices": [{"index": 0, "delta": {"content": [part]}}]})
    found = reply_of(READERS["chat"].whole(events, b"")[0], 0)
    assert reply(message) == reply(found or {}) == canonical(message) == canonical(found)
    assert reply(message) == {"role": "assistant", "content": "x", "reasoning_content": "so"}


@pytest.mark.parametrize(
    ("kind", "item", "reads"),
    [
        ("response.output_text.delta", {"type": "message", "content": []}, "content"),
        ("response.refusal.delta", {"type": "message", "content": []}, "content"),
        ("response.reasoning_summary_text.delta", {"type": "reasoning", "summary": []}, "reasoning_content"),
        ("response.reasoning_text.delta", {"type": "reasoning", "summary": []}, "reasoning_content"),
        ("response.function_call_arguments.delta", {"type": "function_call", "call_id": "c", "name": "f"}, "arguments"),
        (
            "response.custom_tool_call_input.delta",
            {"type": "custom_tool_call", "call_id": "c", "name": "f"},
            "arguments",
        ),
    ],
)
def test_items_of_responses_that_are_cut_off(kind: str, item: dict[str, Any], reads: str) -> None:
    events = READERS["responses"].assembler()
    events.take({"type": "response.created", "response": {"id": "r", "object": "response"}})
    events.take({"type": "response.output_item.added", "output_index": 0, "item": item})
    for piece in ("one ", "two"):
        assert events.take({"type": kind, "output_index": 0, "delta": piece})
    events.finish = "abort"
    response, read = READERS["responses"].whole(events, b"")
    assert read is not None
    message = read.answer.choices[0].message
    said = message["tool_calls"][0]["function"]["arguments"] if reads == "arguments" else message[reads]
    assert "one two" in said
    assert canonical(reply_of(as_chat(REQUEST["responses"], response)[1], 0)) == message


def test_a_message_of_blocks_keeps_what_signs_its_thoughts() -> None:
    events = READERS["messages"].assembler()
    events.take({"type": "message_start", "message": {"type": "message", "id": "m"}})
    events.take({"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}})
    for delta in ({"type": "thinking_delta", "thinking": "so"}, {"type": "signature_delta", "signature": "s"}) * 2:
        assert events.take({"type": "content_block_delta", "index": 0, "delta": delta})
    (block,) = events.response()["content"]
    assert block == {"type": "thinking", "thinking": "soso", "signature": "ss"}


def test_an_echoed_refusal_goes_on_in_its_conversation() -> None:
    asked = {"role": "user", "content": "hi"}
    for said in ({"refusal": "no", "content": None}, {"function_call": {"name": "f", "arguments": "{}"}}):
        message = {"role": "assistant", **said}
        first = READERS["chat"].read_request(orjson.dumps({"messages": [asked]}))
        read = READERS["chat"].answer(orjson.dumps({"choices": [{"message": message}]}), first.digests[-1])
        again = READERS["chat"].read_request(orjson.dumps({"messages": [asked, message]}))
        assert read is not None
        assert read.digests == [again.digests[-1]]


def test_fields_and_lists_have_bounds() -> None:
    pieces = Pieces()
    assert all(pieces.take({f"f{at}": "x"}) for at in range(FIELDS))
    assert not pieces.take({"one_more": "x"})
    assert pieces.take({"f0": "y"})
    assert pieces.whole()["f0"] == "xy"
    lists = Pieces()
    assert lists.take({"a": [0] * (bounds.VALUES // 2)})
    assert not lists.take({"a": [0]})
    assert len(lists.whole()["a"]) == bounds.VALUES // 2
