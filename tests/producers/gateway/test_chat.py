"""Chat completions over real HTTP: plain, streamed, with tools, n, stop and logprobs; and what is captured of them."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from millrace.dialects.rendering.parsers.marker_parser import MarkedParser
from millrace.dialects.rendering.template import TemplateRenderer
from millrace.infra.engines.base import Sampling
from millrace.infra.errors import EngineRejected, EngineTimeout, EngineUnavailable
from millrace.producers.gateway.calls.engine_call import EngineCall
from millrace.schemas.arrays import unpack
from tests.support.gateway_world import ScriptedEngine, World, logprob, world

USER = [{"role": "user", "content": "What is 3 + 4?"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = 'Let me check.\n<tool_call>\n{"name": "add", "arguments": {"a":  3, "b": 4}}\n</tool_call>'


@pytest.fixture
async def w(tmp_path: Path, renderer: TemplateRenderer) -> AsyncIterator[World]:
    def script(prompt: list[int], sampling: Sampling, choice: int) -> Sequence[int]:
        return renderer.tokenizer.encode(w.engine.says + "<|im_end|>")

    engine = ScriptedEngine(script)
    engine.says = "The answer is 42."
    async with world(tmp_path, renderer, engine) as w:
        yield w


def client(w: World, key: str = "x") -> openai.AsyncOpenAI:
    return w.kept(openai.AsyncOpenAI(base_url=f"{w.url}/v1", api_key=key, max_retries=0))


async def test_a_plain_reply_is_captured_exactly(w: World, renderer: TemplateRenderer):
    session = await w.start(task_id="t1", task={"answer": 42})
    answer = await client(w, session["api_key"]).chat.completions.create(
        model="anything",
        messages=USER,
        temperature=1,
        max_tokens=50,
        seed=7,
        logprobs=True,
    )
    assert answer.choices[0].message.content == "The answer is 42."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(renderer.render(USER, None))
    assert answer.choices[0].logprobs is not None
    assert "".join(t.token for t in answer.choices[0].logprobs.content or ()) == "The answer is 42.<|im_end|>"
    started, called = w.events(session["session"])
    assert (started["kind"], started["step"], started["data"]["task"]) == ("episode_started", 0, '{"answer":42}')
    data = called["data"]
    asked = w.engine.asked[0]
    assert unpack(data["prompt_ids"]).tolist() == asked.prompt == renderer.render(USER, None)
    assert unpack(data["output_ids"]).tolist() == asked.ids[0]
    assert unpack(data["output_logprobs"]).tolist() == pytest.approx(
        [logprob(t, i) for i, t in enumerate(asked.ids[0])]
    )
    assert set(unpack(data["output_versions"])) == {0}
    assert (data["opened"], data["turn"], data["trainable"]) == ("it is the first call", 0, True)
    assert data["response_id"] == answer.id
    assert json.loads(data["response"])["id"] == answer.id
    assert json.loads(data["request"])["messages"] == USER
    assert data["sampling"]["seed"] == asked.sampling.seed == 7


async def test_the_first_chunk_leaves_before_the_last_token_exists(w: World):
    session = await w.start()
    w.engine.gate = asyncio.Semaphore(1)
    stream = await client(w, session["api_key"]).chat.completions.create(
        model="m", messages=USER, stream=True, stream_options={"include_usage": True}
    )
    first = await anext(aiter(stream))
    assert first.choices[0].delta.role == "assistant"
    assert w.calls() == []
    assert w.engine.gate.locked()
    for _ in range(100):
        w.engine.gate.release()
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "The answer is 42."
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(w.engine.asked[0].ids[0])
    (data,) = w.calls()
    assert json.loads(data["response"])["choices"][0]["message"]["content"] == "The answer is 42."


async def test_the_call_is_in_the_log_before_the_last_chunk_leaves(w: World):
    session = await w.start()
    stream = await client(w, session["api_key"]).chat.completions.create(model="m", messages=USER, stream=True)
    async for chunk in stream:
        if chunk.choices[0].finish_reason:
            assert len(w.calls()) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_calls_go_round(w: World, stream: bool, renderer: TemplateRenderer):
    session = await w.start()
    api = client(w, session["api_key"])
    w.engine.says = CALL
    if stream:
        events = await api.chat.completions.create(model="m", messages=USER, tools=TOOLS, stream=True)
        deltas = [chunk.choices[0] async for chunk in events]
        made, *more = [call for c in deltas for call in c.delta.tool_calls or ()]
        assert {call.index for call in [made, *more]} == {0}
        for piece in more:
            assert made.function is not None
            assert piece.function is not None
            made.function.arguments = (made.function.arguments or "") + (piece.function.arguments or "")
        assert "".join(c.delta.content or "" for c in deltas) == "Let me check."
        assert deltas[-1].finish_reason == "tool_calls"
        function: Any = made.function
        id: Any = made.id
    else:
        answer = await api.chat.completions.create(model="m", messages=USER, tools=TOOLS)
        assert answer.choices[0].finish_reason == "tool_calls"
        assert answer.choices[0].message.content == "Let me check."
        (call,) = answer.choices[0].message.tool_calls or ()
        assert call.type == "function"
        function, id = call.function, call.id
    assert (function.name, function.arguments) == ("add", '{"a":  3, "b": 4}')
    # The client loses the text, drops nothing it needs, and writes the arguments in its own way.
    echo = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": id, "type": "function", "function": {"name": "add", "arguments": '{"b":4.0,"a":3}'}}],
    }
    w.engine.says = "Seven."
    second = [*USER, echo, {"role": "tool", "tool_call_id": id, "content": "7", "name": "add"}]
    await api.chat.completions.create(model="m", messages=second, tools=TOOLS)
    one, two = w.calls(session["session"])
    assert two["lineage"] == one["lineage"]
    assert two["opened"] is None
    former = [*unpack(one["prompt_ids"]), *unpack(one["output_ids"])]
    assert two["prefix_len"] == len(former)
    assert w.engine.asked[1].prompt == [*former, *unpack(two["prompt_ids"])]
    assert renderer.tokenizer.decode(w.engine.asked[1].prompt).count("arguments") == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_n_choices_are_lineages_of_their_own(tmp_path: Path, renderer: TemplateRenderer, stream: bool):
    engine = ScriptedEngine(lambda prompt, sampling, choice: renderer.tokenizer.encode(f"Choice {choice}<|im_end|>"))
    async with world(tmp_path, renderer, engine) as w:
        answer = await w.chat(USER, n=3, stream=stream)
        if stream:
            lines = [json.loads(part[6:]) for part in answer.text.split("\n\n") if part[:7] == "data: {"]
            texts = dict.fromkeys(range(3), "")
            for line in lines:
                for choice in line["choices"]:
                    texts[choice["index"]] += choice["delta"].get("content") or ""
            assert texts == {i: f"Choice {i}" for i in range(3)}
        else:
            assert [c["message"]["content"] for c in answer.json()["choices"]] == [f"Choice {i}" for i in range(3)]
        calls = w.calls()
        assert [call["choice"] for call in calls] == [0, 1, 2]
        assert len({call["lineage"] for call in calls}) == 3
        assert len({call["response_id"] for call in calls}) == 1
        assert calls[2]["opened"] == "it is choice 2 of 3"
        assert all(unpack(call["prompt_ids"]).tolist() == renderer.render(USER, None) for call in calls)
        picked = [*USER, {"role": "assistant", "content": "Choice 1"}, *USER]
        await w.chat(picked)
        assert w.calls()[-1]["lineage"] == calls[1]["lineage"]


async def test_stop_strings_and_limits(w: World):
    answer = (await w.chat(USER, stop=[" is"])).json()
    assert answer["choices"][0]["message"]["content"] == "The answer"
    assert w.engine.asked[-1].sampling.stop == (" is",)
    answer = (await w.chat(USER, max_completion_tokens=3)).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 3
    session = await w.start(sampling={"temperature": 0.25, "max_tokens": 5})
    await w.chat(USER, session["api_key"])
    assert (w.engine.asked[-1].sampling.temperature, w.engine.asked[-1].sampling.max_tokens) == (0.25, 5)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"temperature": 0}, "greedy"),
        ({"temperature": 0.7}, "altered_sampling"),
        ({"top_p": 0.9}, "altered_sampling"),
        ({"top_k": 20}, "altered_sampling"),
        ({"temperature": 1.0, "top_p": 1.0, "top_k": 0}, None),
    ],
)
async def test_only_what_the_policy_itself_drew_trains(w: World, asked: dict[str, Any], reason: str | None):
    session = await w.start()
    assert (await w.chat(USER, session["api_key"], **asked)).status_code == 200
    assert (w.calls()[-1]["trainable"], w.calls()[-1]["untrainable_reason"]) == (reason is None, reason)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (EngineRejected("too long", 400), 400, "engine_rejected"),
        (EngineRejected("wrong key", 401), 502, "engine_unauthorized"),
        (EngineUnavailable("down"), 502, "engine_unavailable"),
        (EngineTimeout("silent"), 504, "engine_timeout"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_engine_errors_are_told_in_openai_shape(w: World, error: Any, status: int, code: str, stream: bool):
    w.engine.error = error
    answer = await w.chat(USER, stream=stream)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert w.calls() == []
    w.engine.error = None
    assert (await w.chat(USER)).status_code == 200
    assert w.calls()[0]["supersedes"] is None


async def test_an_engine_that_dies_in_a_stream_ends_it_with_an_error_event(w: World):
    w.engine.error, w.engine.break_after = EngineUnavailable("died"), 3
    with pytest.raises(openai.APIError, match="broke off"):
        async for _ in await client(w).chat.completions.create(model="m", messages=USER, stream=True):
            pass
    (data,) = w.calls()
    assert (data["finish_reason"], data["trainable"], data["untrainable_reason"]) == ("abort", False, "aborted")
    assert len(unpack(data["output_ids"])) == 3


async def test_an_aborted_reply_is_retried_by_the_client_and_superseded(w: World):
    session = await w.start()
    w.engine.finish = "abort"
    answer = await w.chat(USER, session["api_key"])
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_aborted")
    w.engine.finish = None
    assert (await w.chat(USER, session["api_key"])).status_code == 200
    one, two = w.calls()
    assert (one["trainable"], two["trainable"]) == (False, True)
    assert two["supersedes"] == one["response_id"]


async def test_a_client_that_goes_away_frees_the_engine_and_is_recorded(w: World):
    session = await w.start()
    w.engine.gate = asyncio.Semaphore(4)
    async with httpx.AsyncClient(base_url=w.url) as http:
        body = {"model": "m", "messages": USER, "stream": True}
        headers = {"authorization": f"Bearer {session['api_key']}"}
        async with http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
            async for line in answer.aiter_lines():
                if "The" in line:
                    break
    for _ in range(6000):
        if w.calls():
            break
        await asyncio.sleep(0.01)
    (data,) = w.calls(session["session"])
    assert (data["finish_reason"], data["trainable"]) == ("abort", False)
    assert unpack(data["output_ids"]).tolist() == w.engine.asked[0].ids[0][: len(unpack(data["output_ids"]))]
    assert w.engine.left_early == 1
    assert not w.gateway.sessions.live[session["session"]].busy


async def test_models_and_health(w: World):
    assert [m.id async for m in client(w).models.list()] == ["policy"]
    health = (await w.http.get("/health")).json()
    assert health["status"] == "ok"
    assert (await w.http.get("/nothing")).json()["error"]["type"] == "invalid_request_error"


async def test_health_says_when_no_engine_serves(w: World):
    async def said() -> tuple[int, str]:
        answer = await w.http.get("/health")
        return answer.status_code, answer.json()["status"]

    assert await said() == (200, "ok"), "nobody vouches for it, and it may serve"
    for state, word in (("serving", "ok"), ("failed", "no engine"), ("loaded", "ok"), ("stopped", "no engine")):
        w.acknowledge(0, state=state)
        assert await said() == (200, word), state
    w.acknowledge(0)
    (target,) = w.gateway.engines.of("policy").fleet.targets.values()
    target.expires_at = 1
    assert await said() == (200, "no engine")


async def test_events_reach_raw(w: World):
    session = await w.start(ticket=5, group_size=2, sample=1, min_version=0)
    w.acknowledge(0)
    await w.chat(USER, session["api_key"])
    own = {"authorization": f"Bearer {session['api_key']}"}
    await w.http.post(f"/v1/sessions/{session['session']}/end", json={}, headers=own)
    assert await asyncio.to_thread(w.forwarder.drain, 5)
    records = [r for p in range(2) for r in w.bus.read("t.raw", p)]
    assert [r.headers["kind"] for r in records] == [b"episode_started", b"model_call", b"episode_ended"]
    assert {r.key for r in records} == {b"local/5"}
    assert [r.headers["source-seq"] for r in records] == [b"0", b"1", b"2"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_call_leaves_nothing_to_the_garbage_collector(w: World, streamed: bool):
    await w.chat([{"role": "user", "content": "hi"}], stream=streamed)
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        await w.chat([{"role": "user", "content": "hi"}], stream=streamed)
        await asyncio.sleep(0.1)  # the task that answered ends
        gc.collect()
        assert not [one for one in gc.garbage if isinstance(one, EngineCall | MarkedParser)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
