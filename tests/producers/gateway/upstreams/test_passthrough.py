"""In front of an upstream that gives text only: passed through byte for byte, captured, never trainable."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from millrace.infra.engines.upstream import UNTRAINABLE, TextUpstream
from tests.support.fake_http import answer, serving, stream
from tests.support.gateway_world import World, world

USER = {"role": "user", "content": "hi"}
REPLY = {
    "id": "chatcmpl-7",
    "object": "chat.completion",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello."}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2},
    "odd_field": [1, 2],
}


@asynccontextmanager
async def before(folder: Path, *scripts: Any) -> AsyncIterator[tuple[World, Any]]:
    async with serving(*scripts) as server:
        upstream = TextUpstream(f"{server.url}/v1", "sk-upstream")
        async with world(folder, None, None, upstream=upstream, keys={"sk-mine": "local"}) as w:
            try:
                yield w, server
            finally:
                await upstream.close()


def chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: " + json.dumps({"id": "chatcmpl-8", "object": "chat.completion.chunk", "choices": [choice]}).encode()


async def test_plain_replies_pass_byte_for_byte(tmp_path: Path):
    raw = json.dumps(REPLY, indent=3).encode()
    async with before(tmp_path, answer(raw)) as (w, server):
        body = b'{"messages": [{"role": "user", "content": "hi"}],  "model": "gpt", "some_new_field": 1}'
        got = await w.http.post("/v1/chat/completions", content=body, headers={"authorization": "Bearer sk-mine"})
        assert got.content == raw
        head, sent = server.requests[0]
        assert sent == body
        assert "Bearer sk-upstream" in head
        assert "sk-mine" not in head
        (call,) = w.calls()
        assert (call["trainable"], call["untrainable_reason"], call["response_id"]) == (
            False,
            UNTRAINABLE,
            "chatcmpl-7",
        )
        assert (call["request"], call["response"]) == (body, raw)
        again = {"model": "gpt", "messages": [USER, REPLY["choices"][0]["message"], USER]}
        await w.http.post("/v1/chat/completions", json=again, headers={"authorization": "Bearer sk-mine"})
        assert len({e["trajectory"] for e in w.events()}) == 1
        assert [call["identified_by"] for call in w.calls()] == ["first", "prefix"]
    async with before(tmp_path, answer(raw)) as (w, _):
        assert len(w.gateway.sessions.live) == 1, "rebuilt from requests that only the upstream understands"


@pytest.mark.parametrize("cut", [False, True])
async def test_streams_pass_and_are_put_together(tmp_path: Path, cut: bool):
    call = {"index": 0, "id": "c1", "function": {"name": "add", "arguments": '{"a"'}}
    more = {"index": 0, "function": {"arguments": ": 1}"}}
    parts = [
        chunk({"role": "assistant", "content": ""}) + b"\n\n",
        chunk({"content": "Hel"}) + b"\n\n" + chunk({"content": "lo"})[:20],
        chunk({"content": "lo"})[20:] + b"\n\n" + chunk({"tool_calls": [call]}) + b"\n\n",
        chunk({"tool_calls": [more]}) + b"\n\n",
        chunk({}, "tool_calls") + b"\n\ndata: [DONE]\n\n",
    ]
    script = stream(*(parts[:3] if cut else parts), then="cut" if cut else "end")
    async with before(tmp_path, script) as (w, _):
        client = w.kept(openai.AsyncOpenAI(base_url=f"{w.url}/v1", api_key="sk-mine", max_retries=0))
        text = ""
        events = await client.chat.completions.create(model="gpt", messages=[USER], stream=True)
        try:
            async for event in events:
                text += event.choices[0].delta.content or ""
        except openai.APIError:
            assert cut
        assert "Hello".startswith(text) if cut else text == "Hello"
        (recorded,) = w.calls()
        message = json.loads(recorded["response"])["choices"][0]["message"]
        assert recorded["finish_reason"] == ("abort" if cut else "tool_calls")
        assert message["content"] == "Hello"
        assert message["tool_calls"][0]["function"]["arguments"] == ('{"a"' if cut else '{"a": 1}')


@pytest.mark.parametrize("streamed", [False, True])
async def test_refusals_pass_and_leave_no_call(tmp_path: Path, streamed: bool):
    refusal = b'{"error": {"message": "no quota", "code": "insufficient_quota"}}'
    async with before(tmp_path, answer(refusal, 429)) as (w, _):
        body = {"model": "gpt", "messages": [USER], "stream": streamed}
        headers = {"authorization": "Bearer sk-mine"}
        got = await w.http.post("/v1/chat/completions", json=body, headers=headers)
        assert (got.status_code, got.content) == (429, refusal)
        assert w.calls() == []
        assert (await w.http.post("/v1/chat/completions", content=b"{", headers=headers)).status_code == 400


async def test_an_upstream_that_is_down(tmp_path: Path):
    upstream = TextUpstream("http://127.0.0.1:9/v1")
    async with world(tmp_path, None, None, upstream=upstream) as w:
        for streamed in (False, True):
            got = await w.http.post("/v1/chat/completions", json={"messages": [USER], "stream": streamed})
            assert (got.status_code, got.json()["error"]["code"]) == (502, "engine_unavailable")
    await upstream.close()


async def test_ending_a_session_ends_its_calls_first(tmp_path: Path):
    parts = [chunk({"role": "assistant", "content": text}) + b"\n\n" for text in ("Hel", "lo", "!")]
    async with before(tmp_path, stream(*parts, then="hang")) as (w, _):
        headers = {"authorization": "Bearer sk-mine"}
        body = {"model": "gpt", "messages": [USER], "stream": True}
        async with w.http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer_:
            await anext(answer_.aiter_bytes())
            (session,) = w.gateway.sessions.live.values()
            assert session.busy
            assert w.gateway.sessions.idle(0) == []
            await w.gateway.end(session, status="completed", stop_condition="idle")
        assert [event["kind"] for event in w.events()] == ["episode_started", "model_call", "episode_ended"]
        assert w.calls()[0]["finish_reason"] == "abort"
