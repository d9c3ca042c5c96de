"""What a request says of its conversation: the same in every API, and the same as the conversation goes on."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.dialects.all import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from millrace.producers.gateway.marks import marked_id, minted_call
from millrace.producers.gateway.processes.evidence import at_the_door, in_the_body
from millrace.producers.gateway.processes.owner import Evidence

words = st.text('ab {}"\n', min_size=1, max_size=6).filter(str.strip)
turns = st.lists(st.tuples(words, words), min_size=1, max_size=4)


def chat(system: str | None, said: list[tuple[str, str]], calls: list[str]) -> bytes:
    messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    for (user, reply), id in zip(said[:-1], calls, strict=False):
        messages += [
            {"role": "user", "content": user},
            {"role": "assistant", "content": reply, "tool_calls": [
                {"id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ]},
            {"role": "tool", "tool_call_id": id, "content": "r"},
        ]  # fmt: skip
    return orjson.dumps({"model": "m", "messages": [*messages, {"role": "user", "content": said[-1][0]}]})


def messages(system: str | None, said: list[tuple[str, str]], calls: list[str]) -> bytes:
    turns: list[dict[str, Any]] = []
    for (user, reply), id in zip(said[:-1], calls, strict=False):
        turns += [
            {"role": "user", "content": [{"type": "text", "text": user}]},
            {"role": "assistant", "content": [
                {"type": "text", "text": reply}, {"type": "tool_use", "id": id, "name": "f", "input": {}}
            ]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": id, "content": "r"}]},
        ]  # fmt: skip
    body = {"model": "m", "max_tokens": 5, "messages": [*turns, {"role": "user", "content": said[-1][0]}]}
    return orjson.dumps(body if system is None else {**body, "system": system})


def responses(system: str | None, said: list[tuple[str, str]], calls: list[str]) -> bytes:
    items: list[dict[str, Any]] = []
    for (user, reply), id in zip(said[:-1], calls, strict=False):
        items += [
            {"role": "user", "content": user},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": reply}]},
            {"type": "function_call", "call_id": id, "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": id, "output": "r"},
        ]
    asked: Any = [*items, {"role": "user", "content": said[-1][0]}] if items else said[-1][0]
    return orjson.dumps({"model": "m", "instructions": system, "input": asked})


APIS = ((CHAT, chat), (MESSAGES, messages), (RESPONSES, responses))


@given(st.none() | words, turns)
def test_a_conversation_has_one_head_in_every_api_at_every_turn(
    system: str | None, said: list[tuple[str, str]]
) -> None:
    calls = [minted_call(1) for _ in said]
    heads = set()
    for dialect, body in APIS:
        for end in range(1, len(said) + 1):
            read = in_the_body(dialect, body(system, said[:end], calls))
            heads.add(read.head)
            assert read == Evidence(call_ids=tuple(calls[: end - 1]), head=read.head)
    assert len(heads) == 1
    assert None not in heads


def test_other_first_messages_have_another_head() -> None:
    heads = {in_the_body(CHAT, chat(s, [(u, "")], [])).head for s in (None, "a", "b") for u in ("a", "b")}
    assert len(heads) == 6


def test_what_only_an_upstream_understands_has_a_head_too() -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}
    odd = {"role": "user", "content": 5}
    for message in (image, odd):
        first = orjson.dumps({"model": "m", "messages": [message]})
        second = orjson.dumps({"model": "m", "messages": [message, {"role": "assistant", "content": "x"}, message]})
        assert in_the_body(CHAT, first).head == in_the_body(CHAT, second).head is not None


def test_the_body_names_a_conversation_where_nothing_else_does() -> None:
    told = '{"session_id": "s-1"}'
    body = orjson.dumps({"model": "m", "max_tokens": 1, "metadata": {"user_id": told}, "messages": []})
    assert in_the_body(MESSAGES, body) == Evidence(name="s-1")
    response = f"resp_{marked_id(1)}"
    body = orjson.dumps({"model": "m", "input": "x", "previous_response_id": response})
    assert in_the_body(RESPONSES, body) == Evidence(exact=response)
    item = f"msg_{marked_id(1)}_0"
    body = orjson.dumps({"model": "m", "input": [{"type": "item_reference", "id": item}]})
    assert in_the_body(RESPONSES, body) == Evidence(exact=item)
    assert in_the_body("start", b'{"attempt": "a"}') == Evidence(attempt="a")
    assert in_the_body("start", b'{"attempt": "a", "parent": "p"}') == Evidence(exact="p")
    assert in_the_body("feedback", b'{"response_id": "r"}') == Evidence(exact="r")
    assert in_the_body("feedback", b'{"response_id": "r", "session": "s"}') == Evidence(name="s")
    assert in_the_body(COMPLETIONS, b'{"model": "m", "prompt": "x"}') == Evidence()


@given(st.sampled_from([CHAT, MESSAGES, RESPONSES, COMPLETIONS, "start", "feedback"]), st.binary() | st.sampled_from(
    [b"[]", b'{"messages": 5}', b'{"messages": [5]}', b'{"input": [[]]}', b'{"messages": ' + b"[" * 9000, b'"\xff"'])
)  # fmt: skip
def test_no_body_is_too_odd_to_be_looked_at(reads: Any, body: bytes) -> None:
    assert isinstance(in_the_body(reads, body), Evidence)


@pytest.mark.parametrize(
    ("method", "path", "headers", "said"),
    [
        ("POST", "/v1/chat/completions", {"authorization": "Bearer mr-a.b"}, Evidence(exact="mr-a.b")),
        ("GET", "/health", {"x-api-key": "mr-a.b"}, Evidence(exact="mr-a.b")),
        ("POST", "/v1/messages", {"x-claude-code-session-id": "n"}, Evidence(name="n")),
        ("POST", "/v1/messages/count_tokens", {"x-session-id": "n"}, Evidence(name="n")),
        ("POST", "/v1/chat/completions", {"session-id": "n", ":session": "p"}, Evidence(name="p")),
        ("POST", "/v1/chat/completions", {"x-millrace-session": "h", ":session": "p"}, Evidence(name="h")),
        ("POST", "/v1/embeddings", {"thread-id": "n"}, Evidence(name="n")),
        ("GET", "/v1/responses/resp_1", {}, Evidence(exact="resp_1")),
        ("DELETE", "/v1/responses/resp_1", {}, Evidence(exact="resp_1")),
        ("GET", "/v1/responses/resp_1/input_items", {}, Evidence(exact="resp_1")),
        ("POST", "/v1/messages/count_tokens", {}, Evidence()),
        ("GET", "/v1/responses/resp_1", {"session-id": "n"}, Evidence(name="n")),
        ("POST", "/v1/sessions/some/reward", {"session-id": "n"}, Evidence(name="some")),
        ("POST", "/v1/sessions/some/end", {}, Evidence(name="some")),
        ("GET", "/v1/models", {"session-id": "n"}, Evidence()),
        ("GET", "/health", {}, Evidence()),
    ],
)
def test_headers_and_the_path_say_it_first(method: str, path: str, headers: dict[str, str], said: Evidence) -> None:
    door = at_the_door(method, path, headers)
    assert (door.evidence, door.reads) == (said, None)


def test_other_requests_say_it_in_their_bodies() -> None:
    reads = {path: at_the_door("POST", path, {}).reads for path in (
        "/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions", "/v1/sessions", "/v1/feedback"
    )}  # fmt: skip
    assert list(reads.values()) == [CHAT, MESSAGES, RESPONSES, COMPLETIONS, "start", "feedback"]
