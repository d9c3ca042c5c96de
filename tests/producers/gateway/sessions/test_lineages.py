"""What clients echo, drop, retry and branch: which stored tokens a call goes on from."""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from millrace.dialects import match_keys
from millrace.dialects.rendering.template import TemplateRenderer
from millrace.dialects.rendering.tokenizer import ChatTokenizer
from millrace.schemas.arrays import unpack
from tests.support import chat_tokenizer
from tests.support.gateway_world import ScriptedEngine, World, world

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
SYSTEM = {"role": "system", "content": "Be short."}
USER = {"role": "user", "content": "What is 3 + 4?"}
MORE = {"role": "user", "content": "And then?"}
CALL = '<tool_call>\n{"name": "add", "arguments": {"z":  "Zürich", "a": 1.0}}\n</tool_call>'
SAYS = f"<think>\nhm\n</think>\nLet me check.\n{CALL}"


@pytest.fixture
async def w(tmp_path: Path, renderer: TemplateRenderer) -> AsyncIterator[World]:
    engine = ScriptedEngine(lambda prompt, sampling, choice: renderer.tokenizer.encode(engine.says + "<|im_end|>"))
    engine.says = "The answer is 42."
    async with world(tmp_path, renderer, engine) as w:
        yield w


def lineage(calls: list[dict[str, Any]]) -> list[int]:
    """The token trace of calls of one lineage, as readers assemble it."""
    tokens: list[int] = []
    for call in calls:
        assert call["prefix_len"] <= len(tokens)
        tokens = [*tokens[: call["prefix_len"]], *unpack(call["prompt_ids"]), *unpack(call["output_ids"])]
    return tokens


def echo_variants() -> dict[str, Any]:
    def drop_reasoning(m: dict[str, Any]) -> None:
        m.pop("reasoning_content")

    def reserialise(m: dict[str, Any]) -> None:
        f = m["tool_calls"][0]["function"]
        f["arguments"] = json.dumps(json.loads(f["arguments"]), ensure_ascii=True, separators=(",", ":"))

    def one_not_float(m: dict[str, Any]) -> None:
        m["tool_calls"][0]["function"]["arguments"] = '{"a":1,"z":"Zürich"}'

    def as_object(m: dict[str, Any]) -> None:
        m["tool_calls"][0]["function"]["arguments"] = {"a": 1, "z": "Zürich"}

    def null_content(m: dict[str, Any]) -> None:
        m["content"] = None

    def empty_content(m: dict[str, Any]) -> None:
        m["content"] = ""

    def newline(m: dict[str, Any]) -> None:
        m["content"] = "\n" + m["content"]

    def blocks(m: dict[str, Any]) -> None:
        m["content"] = [{"type": "text", "text": m["content"], "cache_control": {"type": "ephemeral"}}]

    def renamed_reasoning(m: dict[str, Any]) -> None:
        m["reasoning"] = m.pop("reasoning_content")

    def extra_keys(m: dict[str, Any]) -> None:
        m |= {
            "provider_specific_fields": None,
            "annotations": [],
            "audio": None,
            "refusal": None,
            "function_call": None,
        }

    return {f.__name__: f for f in (
        drop_reasoning, reserialise, one_not_float, as_object, null_content, empty_content, newline, blocks,
        renamed_reasoning, extra_keys,
    )}  # fmt: skip


@pytest.mark.parametrize("change", echo_variants().values(), ids=echo_variants().keys())
async def test_every_known_echo_stays_in_its_lineage(w: World, change: Any):
    key = (await w.start())["api_key"]
    w.engine.says = SAYS
    message = (await w.chat([SYSTEM, USER], key, tools=TOOLS)).json()["choices"][0]["message"]
    assert message["reasoning_content"] == "\nhm\n"
    echoed = copy.deepcopy(message)
    change(echoed)
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "7", "name": "add"}
    w.engine.says = "Seven."
    await w.chat([SYSTEM, USER, echoed, result], key, tools=TOOLS)
    one, two = w.calls()
    assert two["opened"] is None
    assert two["lineage"] == one["lineage"]
    assert lineage([one]) == w.engine.asked[1].prompt[: len(lineage([one]))]
    assert lineage([one, two]) == [*w.engine.asked[1].prompt, *w.engine.asked[1].ids[0]]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m[0].update(content="Be long."), "message 0 (system) differs from what was known"),
        (lambda m: m[1].update(content="Other"), "message 1 (user) differs from what was known"),
        (lambda m: m[2].update(content="Something else"), "message 2 (assistant) differs from what was known"),
        (lambda m: m.pop(0), "message 0 (user) differs from what was known"),
    ],
)
async def test_what_extends_nothing_opens_a_lineage_with_the_reason(w: World, change: Any, reason: str):
    key = (await w.start())["api_key"]
    reply = (await w.chat([SYSTEM, USER], key)).json()["choices"][0]["message"]
    messages = [dict(SYSTEM), dict(USER), reply, MORE]
    change(messages)
    await w.chat(messages, key)
    one, two = w.calls()
    assert (two["opened"], two["prefix_len"]) == (reason, 0)
    assert two["lineage"] != one["lineage"]
    assert lineage([two])[: len(w.engine.asked[1].prompt)] == w.engine.asked[1].prompt


async def test_changed_arguments_are_another_conversation(w: World):
    key = (await w.start())["api_key"]
    w.engine.says = SAYS
    message = (await w.chat([USER], key, tools=TOOLS)).json()["choices"][0]["message"]
    message["tool_calls"][0]["function"]["arguments"] = '{"a": 2, "z": "Bern"}'
    tool = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "7"}
    await w.chat([USER, message, tool], key, tools=TOOLS)
    assert w.calls()[1]["opened"] == "message 1 (assistant) differs from what was known"


async def test_other_tools_open_a_lineage(w: World):
    key = (await w.start())["api_key"]
    reply = (await w.chat([USER], key, tools=TOOLS)).json()["choices"][0]["message"]
    await w.chat([USER, reply, MORE], key)
    assert w.calls()[1]["opened"] == "the tools changed"


async def test_a_retry_supersedes_and_is_answered_anew(w: World):
    key = (await w.start())["api_key"]
    first = (await w.chat([USER], key)).json()
    w.engine.says = "Another answer."
    second = (await w.chat([USER], key)).json()
    assert second["choices"][0]["message"]["content"] == "Another answer."
    assert second["id"] != first["id"]
    one, two = w.calls()
    assert two["supersedes"] == one["response_id"] == first["id"]
    assert (two["turn"], two["lineage"], two["opened"]) == (0, one["lineage"], None)
    assert lineage([one, two]) == [*w.engine.asked[1].prompt, *w.engine.asked[1].ids[0]]
    await w.chat([USER, second["choices"][0]["message"], MORE], key)
    three = w.calls()[2]
    assert (three["turn"], three["lineage"], three["supersedes"]) == (1, one["lineage"], None)
    assert lineage([one, two, three])[:-1] == [*w.engine.asked[2].prompt, *w.engine.asked[2].ids[0]][:-1]


async def test_a_retry_in_another_key_order_is_a_retry(w: World):
    key = (await w.start())["api_key"]
    for body in (
        '{"model": "m", "temperature": 1.0, "messages": [{"role": "user", "content": "hi"}]}',
        '{"messages": [{"content": "hi", "role": "user"}], "temperature": 1, "model": "m"}',
    ):
        headers = {"authorization": f"Bearer {key}"}
        assert (await w.http.post("/v1/chat/completions", content=body, headers=headers)).status_code == 200
    assert w.calls()[1]["supersedes"] == w.calls()[0]["response_id"]


async def test_going_back_to_an_earlier_reply_branches(w: World):
    key = (await w.start())["api_key"]
    reply = (await w.chat([USER], key)).json()["choices"][0]["message"]
    await w.chat([USER, reply, MORE], key)
    await w.chat([USER, reply, {"role": "user", "content": "Something else"}], key)
    one, two, three = w.calls()
    assert two["lineage"] == one["lineage"]
    assert (three["opened"], three["prefix_len"]) == ("it branches off an earlier reply", 0)
    assert lineage([one, two])[:-1] == [*w.engine.asked[1].prompt, *w.engine.asked[1].ids[0]][:-1]


async def test_two_calls_at_once_from_one_reply(w: World):
    import asyncio

    key = (await w.start())["api_key"]
    reply = (await w.chat([USER], key)).json()["choices"][0]["message"]
    w.engine.gate = asyncio.Semaphore(0)
    calls = [asyncio.create_task(w.chat([USER, reply, {"role": "user", "content": c}], key)) for c in "ab"]
    while len(w.engine.asked) < 3:
        await asyncio.sleep(0.01)
    for _ in range(50):
        w.engine.gate.release()
    assert [answer.status_code for answer in await asyncio.gather(*calls)] == [200, 200]
    one, two, three = w.calls()
    assert two["lineage"] == one["lineage"]
    assert three["opened"] == "another call went on from the same reply"
    assert three["prefix_len"] == 0
    prompts = [asked.prompt for asked in w.engine.asked[1:]]
    assert unpack(three["prompt_ids"]).tolist() in prompts


async def test_a_template_that_rewrites_the_past_opens_lineages_visibly(tmp_path: Path):
    renderer = TemplateRenderer(ChatTokenizer(chat_tokenizer.write(tmp_path / "t", chat_tokenizer.FORGETFUL)))
    engine = ScriptedEngine(lambda *_: renderer.tokenizer.encode("<think>\nhm\n</think>\nYes.<|im_end|>"))
    async with world(tmp_path, renderer, engine) as w:
        key = (await w.start())["api_key"]
        reply = (await w.chat([USER], key)).json()["choices"][0]["message"]
        await w.chat([USER, reply, MORE], key)
        assert w.calls()[1]["opened"] == "the template rewrites earlier messages"
        assert engine.asked[1].prompt == renderer.render([USER, reply, MORE], None)


async def test_unsolicited_calls_join_by_prefix_header_or_not_at_all(w: World):
    reply = (await w.chat([USER])).json()["choices"][0]["message"]
    await w.chat([USER, reply, MORE])
    await w.chat([{"role": "user", "content": "A stranger"}])
    await w.chat([USER])  # the same first words are not the same episode
    one, two, three, four = (e for e in w.events() if e["kind"] == "model_call")
    assert one["trajectory"] == two["trajectory"] == one["group"]
    assert len({one["trajectory"], three["trajectory"], four["trajectory"]}) == 3
    started = [e["data"] for e in w.events() if e["kind"] == "episode_started"]
    assert [s["ticket"] for s in started] == [None] * 3
    headers = {"x-session-id": "my-conversation"}
    for text in ("a", "b"):
        body = {"model": "m", "messages": [{"role": "user", "content": text}]}
        assert (await w.http.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
    five, six = [e for e in w.events() if e["kind"] == "model_call"][4:]
    assert five["trajectory"] == six["trajectory"]


def test_keys_ignore_what_clients_change():
    base = {"role": "assistant", "content": " text\n", "reasoning_content": "x", "name": "y"}
    assert match_keys.message_key(base) == match_keys.message_key({"role": "assistant", "content": "text"})
    assert match_keys.message_key(base) != match_keys.message_key({"role": "user", "content": "text"})
    assert match_keys.canonical_json('{"b": [1.0, {"c": 2.50}], "a": null}') == b'{"a":null,"b":[1,{"c":2.5}]}'
    assert match_keys.canonical_json(" not json ") == b"not json"
    assert match_keys.canonical_json('{"a": 1e400}') == match_keys.canonical_json('{"a": 1e400}')
