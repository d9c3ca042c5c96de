"""Laws of translation, over whatever clients can ask and servers can say: a request that can be said in another API
says the same there; a streamed reply is the same wherever its bytes are cut; nothing odd raises anything unforeseen."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

import orjson
import pytest
from anthropic.types import MessageParam
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionMessageParam
from openai.types.responses import ResponseInputItemParam

from millrace.dialects.all import by_name
from millrace.dialects.conversation import Part, Text, Thinking, ToolUse, messages_of
from millrace.dialects.errors import ApiError
from millrace.dialects.translation.all import TRANSLATORS
from millrace.dialects.translation.base import ReplyFacts, Translator, parts_of
from millrace.dialects.translation.reply import TranslatedCall
from millrace.infra.errors import EngineError
from tests.support import odd_json
from tests.support.typed import values
from tests.support.upstream_answers import EVENTS, WHOLE

ITEMS = {
    "chat": ("messages", "max_tokens", ChatCompletionMessageParam),
    "messages": ("messages", "max_tokens", MessageParam),
    "responses": ("input", "max_output_tokens", ResponseInputItemParam),
}
"""by the API: the fields of what is said and of the length of a reply, and what its client can say"""
NO_REQUEST = ("Only text content", "must end with a user message")
"""what is no text, and a conversation that ends with the model's words"""
pairs = pytest.mark.parametrize(
    ("client", "to"),
    [(client, to) for client in ITEMS for to in TRANSLATORS if to.name != client],
    ids=lambda given: given if isinstance(given, str) else given.name,
)
each = pytest.mark.parametrize("to", TRANSLATORS, ids=lambda to: to.name)
slow_to_make = settings(max_examples=60, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def said(messages: list[Any]) -> tuple[Any, ...]:
    """What messages say: the words of either side, the calls and the results in order, and the order of all where no
    tool answered: results stand first in their turn, as most APIs want them. Former thoughts are left out."""
    words = {"assistant": "", "other": ""}
    calls, results, order = list[Any](), list[Any](), list[str]()
    for message in messages:
        text = message.get("content") or ""
        if message["role"] == "tool":
            results.append((message.get("tool_call_id") or "", text))
            continue
        side = "assistant" if message["role"] == "assistant" else "other"
        words[side] += "".join(text.split())
        calls += [(call["id"], call["function"]["name"]) for call in message.get("tool_calls", ())]
        if (text or message.get("tool_calls")) and order[-1:] != [side]:
            order.append(side)
    return words, calls, results, order if not results else None


@pairs
def test_a_request_says_the_same_in_another_api_or_is_refused(client: str, to: Translator) -> None:
    field, most, item = ITEMS[client]
    counted = {"said": 0}

    @slow_to_make
    @given(st.lists(values(item), min_size=1, max_size=4))
    def law(items: list[Any]) -> None:
        body = orjson.dumps({"model": "m", most: 9, field: items})
        try:
            ask = by_name(client).parse(body)
            others = [part for turn in ask.turns if turn.role != "assistant" for part in turn.parts]
            assume(not any(isinstance(part, ToolUse) for part in others))  # nobody but a model calls tools
            written = orjson.dumps(to.request(ask))
        except ApiError:
            return
        try:
            there = to.dialect.parse(written)
            messages = messages_of(there.turns)
        except ApiError as error:
            refused = str(error)
            if not any(said in refused for said in NO_REQUEST):
                raise
            return
        counted["said"] += 1
        expected = said(messages_of(ask.turns))
        found = said(messages)
        assert found == expected
        assert (there.model, there.max_tokens) == (ask.model, ask.max_tokens)

    law()
    assert counted["said"]


TOOLS = {
    "chat": lambda name, more: {"type": "function", "function": {"name": name, "parameters": SCHEMA, **more}},
    "messages": lambda name, more: {"name": name, "input_schema": SCHEMA, **more},
    "responses": lambda name, more: {"type": "function", "name": name, "parameters": SCHEMA, **more},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
STRICT = st.sampled_from(({}, {"strict": None}, {"strict": False}, {"strict": True}, {"strict": "yes"}))


@pairs
@given(st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), STRICT, min_size=1, max_size=4), st.booleans())
def test_the_same_tools_are_strict_in_another_api(
    client: str, to: Translator, tools: dict[str, dict[str, Any]], inside: bool
) -> None:
    field, most, _ = ITEMS[client]
    offered: list[Any] = [TOOLS[client](name, more) for name, more in tools.items()]
    space = "crm__" if inside and client == "responses" else ""
    if space:
        offered = [{"type": "namespace", "name": "crm", "description": "d", "tools": offered}]
    body = {"model": "m", most: 9, field: [{"role": "user", "content": "hi"}], "tools": offered}
    ask = by_name(client).parse(orjson.dumps(body))
    there = to.dialect.parse(orjson.dumps(to.request(ask)))
    strict = {f"{space}{name}" for name, more in tools.items() if more.get("strict") is True}
    assert ask.strict_tools == there.strict_tools == strict
    names = [[tool["function"]["name"] for tool in one.tools or ()] for one in (ask, there)]
    assert names[0] == names[1] == [f"{space}{name}" for name in tools]


def heard(to: Translator, pieces: list[bytes]) -> tuple[list[Part], ReplyFacts]:
    """What a stream in these pieces says: texts and thoughts that follow each other in one."""
    listener, out = to.listener(), list[Part]()
    for piece in pieces:
        for part in listener.hear(piece):
            if out and isinstance(part, Text | Thinking) and type(out[-1]) is type(part):
                out[-1] = type(part)(out[-1].text + part.text)  # type: ignore[union-attr]
            else:
                out.append(part)
    return out, listener.told


@each
def test_a_streamed_reply_is_the_same_wherever_it_is_cut(to: Translator) -> None:
    whole = b"".join(b"data: " + orjson.dumps(event) + b"\n\n" for event in EVENTS[to.name])
    parts, told = heard(to, [whole])
    assert told.finish is not None
    assert parts

    @slow_to_make
    @given(st.lists(st.integers(0, len(whole)), max_size=8))
    def law(places: list[int]) -> None:
        cuts = [0, *sorted(places), len(whole)]
        pieces = [whole[start:end] for start, end in pairwise(cuts)]
        assert heard(to, pieces) == (parts, told)

    law()


@each
def test_nothing_that_a_server_says_raises_anything_unforeseen(to: Translator) -> None:
    random = Random(7)
    for _ in range(600):
        events = [odd_json.changed(random, event) for event in EVENTS[to.name]]
        parts, told = heard(
            to, [b"data: " + odd_json.text(event).encode(errors="replace") + b"\n\n" for event in events]
        )
        for client in ITEMS:
            ask = by_name(client).parse(orjson.dumps({"model": "m", "max_tokens": 9, **smallest(client)}))
            call = TranslatedCall(ask, "x", told)
            writer = by_name(client).stream_writer(call)
            writer.take(call.choice, call.choice.say(parts), 0)
            call.end()
            writer.end()
            orjson.loads(by_name(client).whole(call, call.choices))
        found = odd_json.changed(random, WHOLE[to.name])
        try:
            answer, _ = to.whole(found if isinstance(found, dict) else {})
            parts_of(answer)
        except EngineError:
            continue


def smallest(client: str) -> dict[str, Any]:
    return {"input": "hi"} if client == "responses" else {"messages": [{"role": "user", "content": "hi"}]}
