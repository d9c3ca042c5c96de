"""OpenAI's Responses beyond what every dialect keeps: the order of events, echoes that change, names, refusals."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import openai
import pytest

from millrace.dialects.rendering.template import TemplateRenderer
from millrace.infra.engines.base import Sampling
from tests.support.documents import ROOT
from tests.support.gateway_world import ScriptedEngine, World, world

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "add", "description": "d", "parameters": {"type": "object"}, "strict": False}
CALLS = "".join(f'\n<tool_call>\n{{"name": "add", "arguments": {{"a":  {a}.0}}}}\n</tool_call>' for a in (3, 4))
REPLY = f"<think>\nhm\n</think>\n\nLet me check.{CALLS}"
PAGE = (ROOT / "docs" / "apis.md").read_text().partition("## OpenAI's Responses")[2].partition("\n## ")[0]
REFUSED = re.findall(r"^\| `({.*})` \| (.*) \|$", PAGE, re.MULTILINE)


@pytest.fixture
async def w(tmp_path: Path, renderer: TemplateRenderer) -> AsyncIterator[World]:
    def script(prompt: list[int], sampling: Sampling, choice: int) -> Sequence[int]:
        return renderer.tokenizer.encode(engine.says + "<|im_end|>")

    engine = ScriptedEngine(script)
    engine.says = REPLY
    async with world(tmp_path, renderer, engine) as w:
        yield w


def client(w: World, key: str = "x") -> openai.AsyncOpenAI:
    return w.kept(openai.AsyncOpenAI(base_url=f"{w.url}/v1", api_key=key, max_retries=0))


async def test_events_come_in_the_order_of_the_api(w: World) -> None:
    seen = [event async for event in await client(w).responses.create(model="m", input="hi", tools=[TOOL], stream=True)]
    # Text, thoughts and arguments come in as many pieces as they are sampled in.
    kinds = [kind.removeprefix("response.") for kind, _ in groupby(event.type for event in seen)]
    call = [
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
    ]  # fmt: skip
    assert list(dict.fromkeys(kinds[: -2 * len(call) - 1])) == [
        "created", "in_progress", "output_item.added", "reasoning_summary_part.added", "reasoning_summary_text.delta",
        "reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done", "content_part.added",
        "output_text.delta", "output_text.done", "content_part.done",
    ]  # fmt: skip
    assert kinds[-2 * len(call) - 1 :] == [*call, *call, "completed"]
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    done = [event.item.id for event in seen if event.type == "response.output_item.done"]
    assert done == [item.id for item in seen[-1].response.output]
    assert len(set(done)) == 4
    assert {event.response.id for event in seen if hasattr(event, "response")} == {w.calls()[0]["response_id"]}


def _whole(items: list[Any]) -> list[Any]:
    return items


def _resumed(items: list[Any]) -> list[Any]:
    """As Codex after `resume`."""
    return [{**item, "content": None} if item["type"] == "reasoning" else item for item in items]


def _thinking(items: list[Any]) -> list[Any]:
    """As pydantic-ai: thoughts in a message, arguments compact, no ids of items."""
    thought, text, *calls = items
    said = f"<think>\n{thought['summary'][0]['text']}\n</think>"
    plain = [{**call, "arguments": json.dumps(json.loads(call["arguments"]), separators=(",", ":"))} for call in calls]
    kept = [{"role": "assistant", "content": said}, {"role": "assistant", "content": text["content"][0]["text"]}]
    return [*kept, *({name: value for name, value in call.items() if name != "id"} for call in plain)]


def _without(items: list[Any]) -> list[Any]:
    """Thoughts dropped, 1.0 written as 1."""
    return [
        {**item, "arguments": item["arguments"].replace(".0", "")} if "arguments" in item else item
        for item in items
        if item["type"] != "reasoning"
    ]


@pytest.mark.parametrize("echo", [_whole, _resumed, _thinking, _without])
async def test_what_clients_change_in_an_echo_breaks_no_lineage(w: World, echo: Any) -> None:
    api = client(w, (await w.start())["api_key"])
    first = await api.responses.create(model="m", input="add", instructions="s", tools=[TOOL])
    items = echo([item.model_dump() for item in first.output])
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "7"}
        for item in items
        if item.get("type") == "function_call"
    ]
    assert len(results) == 2
    talk = [{"role": "user", "content": [{"type": "input_text", "text": "add"}]}, *items, *results]
    w.engine.says = "Seven."
    second = await api.responses.create(model="m", input=talk, instructions="s", tools=[TOOL], store=False)
    more = [*talk, {"role": "assistant", "content": second.output_text}, {"role": "user", "content": "thanks"}]
    await api.responses.create(model="m", input=more, instructions="s", tools=[TOOL])
    calls = w.calls()
    assert [call["opened"] for call in calls[1:]] == [None, None]
    assert len({call["lineage"] for call in calls}) == 1


@pytest.mark.parametrize("header", ["session-id", "thread-id"])
async def test_headers_of_codex_name_a_conversation(w: World, header: str) -> None:
    for text in ("one", "two"):
        await client(w).responses.create(model="m", input=text, extra_headers={header: "t-1"})
    assert len({event["trajectory"] for event in w.events()}) == 1


async def test_a_reply_that_is_cut_is_incomplete(w: World) -> None:
    response = await client(w).responses.create(model="m", input="hi", max_output_tokens=3)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")


async def test_a_reply_that_the_engine_aborts_has_failed(w: World) -> None:
    w.engine.finish = "abort"
    events = [event async for event in await client(w).responses.create(model="m", input="hi", stream=True)]
    assert events[-1].type == "response.failed"
    assert (events[-1].response.status, events[-1].response.error.code) == ("failed", "server_error")
    (call,) = w.calls()
    assert (call["finish_reason"], call["trainable"]) == ("abort", False)


async def test_the_code_of_the_page_goes_on_on_exact_tokens(w: World) -> None:
    w.engine.says = "The answer is 42."
    code = PAGE.partition("```python\n")[2].partition("```")[0].replace("http://127.0.0.1:8900", w.url)
    code = code.replace("input=[", 'extra_headers={"session-id": "chat-19"}, input=[')
    await asyncio.to_thread(exec, code, {})
    first, *later = w.calls()
    assert [(call["opened"], call["lineage"]) for call in later] == [(None, first["lineage"])] * 2


def test_the_page_has_what_is_refused() -> None:
    assert len(REFUSED) >= 12, "the table of what is not supported has another form"


@pytest.mark.parametrize(("given", "message"), REFUSED)
async def test_what_the_page_calls_unsupported_is_refused_as_it_says(w: World, given: str, message: str) -> None:
    answer = await w.http.post(PATH, json={"model": "m", "input": "hi", **json.loads(given)})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"] == message
    assert w.events() == []


async def test_what_the_page_calls_without_effect_is_accepted(w: World) -> None:
    names = re.findall(r"`(\w+)`", PAGE.partition("without any effect")[2].partition(";")[0])
    assert len(names) >= 8
    given: dict[str, Any] = {
        "include": ["reasoning.encrypted_content"], "reasoning": {"effort": "low"}, "metadata": {},
        "parallel_tool_calls": False, "client_metadata": {},
    }  # fmt: skip
    plain = {"model": "m", "input": "hi"}
    for body in (plain, {**plain, **{name: given.get(name, "x") for name in names}}):
        answer = await w.http.post(PATH, json=body)
        assert answer.status_code == 200, answer.text
    assert w.engine.asked[0].prompt == w.engine.asked[1].prompt
