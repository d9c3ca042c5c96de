"""Anthropic's Messages beyond what every dialect keeps: blocks, echoes that change, thoughts, names, counts, errors."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import anthropic
import openai
import orjson
import pytest

from millrace.dialects.all import MESSAGES
from millrace.dialects.errors import ApiError
from millrace.dialects.rendering.template import TemplateRenderer
from millrace.infra.engines.base import Sampling
from millrace.infra.engines.upstream import TextUpstream
from millrace.schemas.arrays import unpack
from tests.support.documents import ROOT
from tests.support.gateway_world import ScriptedEngine, World, world

PATH = "/v1/messages"
USER = [{"role": "user", "content": "What is 3 + 4?"}]
TOOL = {"name": "add", "description": "d", "input_schema": {"type": "object"}}
CALL = '<think>\nhm\n</think>\n\nLet me check.\n<tool_call>\n{"name": "add", "arguments": {"a":  3}}\n</tool_call>'
SHOWN = {"type": "enabled", "budget_tokens": 1024}
PAGE = (ROOT / "docs" / "apis.md").read_text().partition("## Anthropic's Messages")[2].partition("\n## ")[0]
REFUSED = re.findall(r"^\| `({.*})` \| (.*) \|$", PAGE, re.MULTILINE)


@pytest.fixture
async def w(tmp_path: Path, renderer: TemplateRenderer) -> AsyncIterator[World]:
    def script(prompt: list[int], sampling: Sampling, choice: int) -> Sequence[int]:
        return renderer.tokenizer.encode(engine.says + "<|im_end|>")

    engine = ScriptedEngine(script)
    engine.says = "The answer is 42."
    async with world(tmp_path, renderer, engine, max_model_len=500) as w:
        yield w


def client(w: World, key: str = "x", **more: Any) -> anthropic.AsyncAnthropic:
    return w.kept(anthropic.AsyncAnthropic(base_url=w.url, api_key=key, max_retries=0, **more))


def request(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 100, "messages": USER, **fields}


def one_lineage(w: World, calls: int) -> None:
    found = w.calls()
    assert len(found) == calls
    assert [call["opened"] for call in found[1:]] == [None] * (calls - 1)
    assert len({call["lineage"] for call in found}) == 1


async def test_blocks_and_strings_are_the_same_prompt(w: World, renderer: TemplateRenderer) -> None:
    api = client(w)
    await api.messages.create(**request(system="Be brief."))
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1"}
    system = [billing, {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    blocks = [{"type": "text", "text": "What is 3 + 4?", "cache_control": {"type": "ephemeral"}}]
    await api.beta.messages.create(**request(system=system, messages=[{"role": "user", "content": blocks}]))
    first, second = w.engine.asked
    assert first.prompt == second.prompt
    assert first.prompt == renderer.render([{"role": "system", "content": "Be brief."}, USER[0]], None)


async def test_blocks_of_text_stand_on_lines_of_their_own(w: World, renderer: TemplateRenderer) -> None:
    blocks = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    await client(w).messages.create(**request(system=blocks, messages=[{"role": "user", "content": blocks}]))
    said = "one\ntwo"
    assert w.engine.asked[0].prompt == renderer.render(
        [{"role": "system", "content": said}, {"role": "user", "content": said}], None
    )


@pytest.mark.parametrize("kept", [True, False], ids=["thoughts", "no thoughts"])
async def test_what_agents_change_in_an_echo_breaks_no_lineage(w: World, kept: bool) -> None:
    """Thoughts dropped, cache_control moved to the newest block, keys added, 1.0 written as 1, text as a string."""
    api = client(w, (await w.start())["api_key"])
    w.engine.says = CALL
    cached = {"cache_control": {"type": "ephemeral"}}
    first = [{"role": "user", "content": [{"type": "text", "text": "add", **cached}]}]
    message = await api.messages.create(**request(messages=first, tools=[{**TOOL, **cached}], thinking=SHOWN))
    thought, text, call = (block.model_dump() for block in message.content)
    assert (thought["type"], text["text"], call["input"]) == ("thinking", "Let me check.", {"a": 3})
    echo = [*([thought] if kept else []), {**text, "citations": None}, {**call, "input": {"a": 3.0}, "caller": None}]
    result = {"type": "tool_result", "tool_use_id": call["id"], "is_error": False}
    second = [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": echo},
        {"role": "user", "content": [{**result, "content": [{"type": "text", "text": "7", **cached}]}]},
    ]
    w.engine.says = "Seven."
    answer = await api.messages.create(**request(messages=second, tools=[TOOL]))
    third = [
        *second[:2],
        {"role": "user", "content": [{**result, "content": "7"}]},
        {"role": "assistant", "content": answer.content[0].text},
        {"role": "user", "content": [{"type": "text", "text": "thanks", **cached}]},
    ]
    await api.messages.create(**request(messages=third, tools=[TOOL]))
    one_lineage(w, 3)


async def test_one_session_in_two_dialects_is_one_lineage(w: World) -> None:
    key = (await w.start())["api_key"]
    w.engine.says = CALL
    message = await client(w, key).messages.create(**request(tools=[TOOL]))
    call = message.content[-1]
    w.engine.says = "Seven."
    function = {"name": "add", "arguments": json.dumps(call.input)}
    echo = {"role": "assistant", "tool_calls": [{"id": call.id, "type": "function", "function": function}]}
    tool = {"name": "add", "description": "d", "parameters": {"type": "object"}}
    answer = await w.kept(openai.AsyncOpenAI(base_url=f"{w.url}/v1", api_key=key)).chat.completions.create(
        model="m",
        messages=[*USER, echo, {"role": "tool", "tool_call_id": call.id, "content": "7"}],
        tools=[{"type": "function", "function": tool}],
    )
    back = [
        *USER,
        {"role": "assistant", "content": [block.model_dump() for block in message.content]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "7"}]},
        {"role": "assistant", "content": answer.choices[0].message.content},
        {"role": "user", "content": "thanks"},
    ]
    await client(w, key).messages.create(**request(messages=back, tools=[TOOL]))
    one_lineage(w, 3)


async def test_the_names_of_tools_that_a_search_found_are_its_result(w: World, renderer: TemplateRenderer) -> None:
    w.engine.says = CALL
    api = client(w, (await w.start())["api_key"])
    message = await api.messages.create(**request(tools=[TOOL]))
    found = [{"type": "tool_reference", "tool_name": f"mcp__calc__{name}"} for name in ("sub", "mul")]
    result = {"type": "tool_result", "tool_use_id": message.content[-1].id, "content": found}
    back = [*USER, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    await api.messages.create(**request(messages=back, tools=[TOOL]))
    one_lineage(w, 2)
    assert "mcp__calc__sub\nmcp__calc__mul" in renderer.tokenizer.decode(w.engine.asked[1].prompt)


@pytest.mark.parametrize("thinking", [None, {"type": "disabled"}, {**SHOWN, "display": "omitted"}])
async def test_thoughts_are_shown_to_who_asks_and_recorded_for_all(w: World, thinking: Any) -> None:
    w.engine.says = "<think>\nhm\n</think>\n\nSeven."
    given = request() if thinking is None else request(thinking=thinking)
    message = await client(w).messages.create(**given)
    async with client(w).messages.stream(**given) as stream:
        streamed = await stream.get_final_message()
    for told in (message, streamed):
        assert [block.type for block in told.content] == ["text"]
    for call in w.calls():
        thought, text = json.loads(call["response"])["content"]
        assert (thought["type"], thought["thinking"].strip(), text["text"]) == ("thinking", "hm", "Seven.")


async def test_shown_thoughts_have_a_signature_whole_and_streamed(w: World) -> None:
    w.engine.says = "<think>\nhm\n</think>\n\nSeven."
    message = await client(w).messages.create(**request(thinking=SHOWN))
    async with client(w).messages.stream(**request(thinking=SHOWN)) as stream:
        streamed = await stream.get_final_message()
    assert message.content[0].model_dump() == streamed.content[0].model_dump()
    assert message.content[0].signature


async def test_a_stop_sequence_is_named(w: World, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = w.engine.generate

    async def stopped(*args: Any, **named: Any) -> Any:
        async for chunk in generate(*args, **named):
            chunk.stop_reason = "is" if chunk.finish_reason else None
            yield chunk

    monkeypatch.setattr(w.engine, "generate", stopped)
    message = await client(w).messages.create(**request(stop_sequences=["is"]))
    assert (message.stop_reason, message.stop_sequence, message.content[0].text) == (
        "stop_sequence",
        "is",
        "The answer ",
    )
    assert w.calls()[0]["stop_condition"] == "is"


async def test_more_tokens_than_fit_are_cut_to_the_room(w: World, renderer: TemplateRenderer) -> None:
    w.engine.says = "a " * 1000
    message = await client(w).messages.create(**request(max_tokens=20_000))
    room = 500 - len(renderer.render(USER, None))
    assert w.engine.asked[0].sampling.max_tokens == message.usage.output_tokens == room
    assert message.stop_reason == "model_context_window_exceeded"


# ---------------------------------------------------------------------- whose


async def test_a_session_of_claude_code_is_one_episode(w: World) -> None:
    for number, named in enumerate(("a", "b", "a")):
        api = client(w, default_headers={"x-claude-code-session-id": named})
        await api.messages.create(**request(messages=[{"role": "user", "content": str(number)}]))
    for named in ("a", "b"):
        user = json.dumps({"device_id": "d", "session_id": named})
        await client(w).messages.create(**request(metadata={"user_id": user}))
    episodes = [event["trajectory"] for event in w.events() if event["kind"] == "model_call"]
    assert episodes[0] == episodes[2] == episodes[3] != episodes[1] == episodes[4]


async def test_a_plain_user_id_is_the_end_user(w: World) -> None:
    said = [*USER, {"role": "assistant", "content": "The answer is 42."}, {"role": "user", "content": "so"}]
    for user in ("ann", "bob"):
        await client(w).messages.create(**request(metadata={"user_id": user}))
    for user in ("ann", "bob"):
        await client(w).messages.create(**request(messages=said, metadata={"user_id": user}))
    one, two, three, four = [event["trajectory"] for event in w.events() if event["kind"] == "model_call"]
    assert (one, two) == (three, four)
    assert one != two


@pytest.mark.parametrize("header", ["x-api-key", "authorization"])
async def test_both_forms_of_a_key_are_taken(tmp_path: Path, renderer: TemplateRenderer, header: str) -> None:
    engine = ScriptedEngine(lambda *_: renderer.tokenizer.encode("x<|im_end|>"))
    async with world(tmp_path, renderer, engine, keys={"sk-one": "t"}) as w:
        given = "sk-one" if header == "x-api-key" else "Bearer sk-one"
        answer = await w.http.post(f"{PATH}?beta=true", json=request(), headers={header: given})
        assert answer.status_code == 200
        refused = await w.http.post(PATH, json=request(), headers={header: "no"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")


# ---------------------------------------------------------------------- counting


async def test_tokens_are_counted_as_the_prompt_has_them(w: World) -> None:
    given: dict[str, Any] = {"model": "m", "messages": USER, "system": "Be brief.", "tools": [TOOL]}
    counted = await client(w).messages.count_tokens(**given)
    message = await client(w).messages.create(**given, max_tokens=5)
    assert counted.input_tokens == message.usage.input_tokens == len(w.engine.asked[0].prompt)
    assert len(w.calls()) == 1


async def test_a_count_of_too_much_is_refused(w: World) -> None:
    with pytest.raises(anthropic.BadRequestError, match="longer than the model's context"):
        await client(w).messages.count_tokens(model="m", messages=[{"role": "user", "content": "a " * 100_000}])


# ---------------------------------------------------------------------- events and errors


async def test_events_come_in_order_each_by_its_name(w: World) -> None:
    w.engine.says = CALL
    answer = await w.http.post(PATH, json=request(stream=True, tools=[TOOL], thinking=SHOWN))
    named = re.findall(r"^event: (\w+)\ndata: (.*)\n\n", answer.text, re.MULTILINE)
    events = [(name, json.loads(data)) for name, data in named]
    assert all(name == event["type"] for name, event in events)
    assert answer.text == "".join(f"event: {name}\ndata: {data}\n\n" for name, data in named)
    order = [name for name, event in events if name != "content_block_delta"]
    block = ["content_block_start", "content_block_stop"]
    assert order == ["message_start", *block * 3, "message_delta", "message_stop"]
    indexes = [event["index"] for _, event in events if "index" in event]
    assert indexes == sorted(indexes)
    start = events[0][1]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    assert events[-2][1]["usage"]["output_tokens"] == len(w.engine.asked[0].ids[0])


async def test_a_silent_stream_is_kept_alive_by_pings(tmp_path: Path, renderer: TemplateRenderer) -> None:
    engine = ScriptedEngine(lambda *_: renderer.tokenizer.encode("The answer is 42.<|im_end|>"))
    engine.gate = asyncio.Semaphore(0)
    async with world(tmp_path, renderer, engine, keep_alive_s=0.05) as w:
        pings, body = 0, ""
        async with w.http.stream("POST", PATH, json=request(stream=True)) as answer:
            async for line in answer.aiter_lines():
                pings += line == 'data: {"type":"ping"}'
                body += line + "\n"
                if pings == 2 and engine.gate._value == 0:
                    for _ in range(100):
                        engine.gate.release()
        assert body.startswith("event: ping\n")
        assert "event: message_stop" in body


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", PATH, 405, "invalid_request_error"),
        ("POST", f"{PATH}/batches", 404, "not_found_error"),
        ("POST", f"{PATH}/count_tokens", 400, "invalid_request_error"),
    ],
)
async def test_errors_have_the_shape_of_the_api(w: World, method: str, path: str, status: int, kind: str) -> None:
    answer = await w.http.request(method, path, json={})
    assert answer.status_code == status
    assert answer.json() == {"type": "error", "error": {"type": kind, "message": answer.json()["error"]["message"]}}


async def test_a_session_that_has_ended_says_so(w: World) -> None:
    session = await w.start()
    await w.http.post(f"/v1/sessions/{session['session']}/end", headers={"x-api-key": session["api_key"]}, json={})
    with pytest.raises(anthropic.PermissionDeniedError, match="has ended"):
        await client(w, session["api_key"]).messages.create(**request())


async def test_an_upstream_of_chat_completions_counts_no_tokens(tmp_path: Path) -> None:
    async with world(tmp_path, None, None, upstream=TextUpstream("http://127.0.0.1:9/v1")) as w:
        answer = await w.http.post(f"{PATH}/count_tokens", json=request())
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")


def test_the_page_has_what_is_refused() -> None:
    assert len(REFUSED) >= 10, "the table of what is not supported has another form"


@pytest.mark.parametrize(("given", "message"), REFUSED)
async def test_what_the_page_calls_unsupported_is_refused_as_it_says(w: World, given: str, message: str) -> None:
    answer = await w.http.post(PATH, json=request(**json.loads(given)))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"] == {"type": "invalid_request_error", "message": message}
    assert w.events() == []


async def test_what_the_page_calls_without_effect_is_accepted(w: World) -> None:
    names = re.findall(r"`(\w+)`", PAGE.partition("without any effect")[2].partition("\n\n")[0])
    assert len(names) >= 8
    given = {
        "output_config": {"effort": "low"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }
    await client(w).messages.create(**request())
    answer = await w.http.post(PATH, json=request(**{name: given.get(name, "x") for name in names}))
    assert answer.status_code == 200, answer.text
    assert w.engine.asked[0].prompt == w.engine.asked[1].prompt


async def test_what_went_into_a_session_is_in_its_tokens(w: World) -> None:
    await client(w, (await w.start())["api_key"]).messages.create(**request())
    (call,) = w.calls()
    assert unpack(call["prompt_ids"]).tolist() == w.engine.asked[0].prompt
    assert unpack(call["output_ids"]).tolist() == w.engine.asked[0].ids[0]
    assert call["response_id"].startswith("msg_")


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
def test_a_thread_is_refused_in_the_words_by_which_clients_go_on_without(thread: dict[str, Any]) -> None:
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], "thread": thread}
    with pytest.raises(ApiError) as refused:
        MESSAGES.parse(orjson.dumps(body))
    error = orjson.loads(MESSAGES.error(refused.value))["error"]
    assert (refused.value.status, error["type"]) == (400, "invalid_request_error")
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": []}
