"""Responses over a WebSocket, driven by OpenAI's client and by a client that does what it likes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from millrace.dialects.rendering.template import TemplateRenderer
from millrace.infra.errors import EngineUnavailable
from millrace.producers.gateway import socket as module
from millrace.producers.gateway.calls import gateway as gateway_module
from tests.support.gateway_world import ScriptedEngine, World, world
from tests.support.speakers import ResponsesSpeaker, Results, SocketError, SocketSpeaker

CALL = '<think>\nhm\n</think>\n\nLet me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
HELLO = {"type": "response.create", "model": "m", "input": "hi"}


@pytest.fixture
async def w(tmp_path: Path, renderer: TemplateRenderer) -> AsyncIterator[World]:
    engine = ScriptedEngine(lambda *_: renderer.tokenizer.encode(engine.says + "<|im_end|>"))
    engine.says = CALL
    async with world(tmp_path, renderer, engine, patience_s=0.0) as w:
        yield w


@pytest.fixture
async def raw(w: World) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    async with aiohttp.ClientSession() as http, http.ws_connect(f"{w.url}/v1/responses") as socket:
        yield socket


async def until_end(socket: aiohttp.ClientWebSocketResponse) -> list[dict[str, Any]]:
    """Events up to the end of a response, or to an error."""
    out = []
    async with asyncio.timeout(60):
        while not out or out[-1]["type"] not in ("response.completed", "error"):
            message = await socket.receive()
            assert message.type == aiohttp.WSMsgType.TEXT, message
            out.append(json.loads(message.data))
    return out


async def test_a_socket_says_what_a_stream_says_and_goes_on_on_exact_tokens(w: World) -> None:
    """Over one socket, by previous_response_id, with tools in between."""
    client = SocketSpeaker(w, (await w.start())["api_key"])
    async with client.client.responses.connect() as connection:
        tools = [{"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}]
        said = await client.over(connection, model="m", input="hi", tools=tools)
        assert (said.thoughts.strip(), said.text, said.calls[0][1]) == ("hm", "Let me see.", "add")
        w.engine.says = "Two."
        results = client.items([Results({id: "2" for id, *_ in said.calls})])
        again = await client.over(connection, model="m", input=results, previous_response_id=said.id, tools=tools)
        assert again.text == "Two."
    first, second = w.calls()
    assert (second["lineage"], second["opened"]) == (first["lineage"], None)
    assert all(call["trainable"] for call in w.calls())
    plain = await ResponsesSpeaker(w).say(["hi"], stream=True)
    assert (plain.text, plain.end) == ("Two.", "stop")


async def test_errors_are_events_and_the_socket_goes_on(w: World, raw: aiohttp.ClientWebSocketResponse) -> None:
    for frame in (
        "",
        "{",
        "[]",
        "7",
        "null",
        '"' * 3,
        "[" * 5000,
        '{"type": 3}',
        '{"type": "response.steer"}',
        '{"type": "response.create"}',
        '{"type": "response.create", "model": "m", "input": 3}',
        '{"type": "response.create", "model": "m", "input": "hi", "previous_response_id": "resp_x"}',
    ):
        await raw.send_str(frame)
        (error,) = await until_end(raw)
        assert (error["type"], error["status"], bool(error["error"]["message"])) == ("error", 400, True)
    await raw.send_bytes(b"\xff\xfe")
    assert (await until_end(raw))[0]["status"] == 400
    assert w.calls() == []
    await raw.send_bytes(json.dumps(HELLO).encode())
    assert (await until_end(raw))[-1]["type"] == "response.completed"


async def test_one_call_at_a_time(w: World, raw: aiohttp.ClientWebSocketResponse) -> None:
    w.engine.gate = asyncio.Semaphore(2)
    await raw.send_json(HELLO)
    assert json.loads((await raw.receive()).data)["type"] == "response.created"
    await raw.send_json(HELLO)
    assert (await until_end(raw))[-1]["status"] == 409
    for _ in range(1000):
        w.engine.gate.release()
    assert (await until_end(raw))[-1]["type"] == "response.completed"
    assert len(w.calls()) == 1


@pytest.mark.parametrize("how", ["close", "abort"])
async def test_a_client_that_leaves_ends_its_call(w: World, how: str) -> None:
    w.engine.gate = asyncio.Semaphore(2)
    async with aiohttp.ClientSession() as http, http.ws_connect(f"{w.url}/v1/responses") as socket:
        await socket.send_json(HELLO)
        assert json.loads((await socket.receive()).data)["type"] == "response.created"
        if how == "abort":
            transport = socket._response.connection.transport  # type: ignore[union-attr]
            assert transport is not None
            transport.abort()
        else:
            await socket.close()
    async with asyncio.timeout(60):
        while not w.calls():
            await asyncio.sleep(0.01)
    (call,) = w.calls()
    assert (call["finish_reason"], call["trainable"]) == ("abort", False)
    assert w.engine.left_early == 1


async def test_the_end_of_a_session_ends_its_call_and_not_the_socket(w: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_module, "ENDING_S", 3600.0)  # whoever waits so long for the call waits for ever
    session, other = await w.start(), await w.start()
    key = {"authorization": f"Bearer {session['api_key']}"}
    w.engine.gate = asyncio.Semaphore(2)
    async with aiohttp.ClientSession(headers=key) as http, http.ws_connect(f"{w.url}/v1/responses") as socket:
        await socket.send_json(HELLO)
        assert json.loads((await socket.receive()).data)["type"] == "response.created"
        ended = await w.http.post(f"/v1/sessions/{session['session']}/end", json={}, headers=key)
        assert ended.status_code == 200
        cut = (await until_end(socket))[-1]
        assert (cut["type"], cut["status"], cut["error"]["code"]) == ("error", 503, "cut_off")
        await socket.send_json(HELLO)
        assert (await until_end(socket))[-1]["error"]["code"] == "session_ended"
    kinds = [event["kind"] for event in w.events(session["session"])]
    assert kinds == ["episode_started", "model_call", "episode_ended"]
    assert w.calls()[0]["finish_reason"] == "abort"
    assert not w.gateway.sessions.live[other["session"]].busy


async def test_a_frame_has_a_bound(tmp_path: Path, renderer: TemplateRenderer) -> None:
    engine = ScriptedEngine(lambda *_: renderer.tokenizer.encode("x<|im_end|>"))
    async with (
        world(tmp_path, renderer, engine, max_body_bytes=1000) as w,
        aiohttp.ClientSession() as http,
        http.ws_connect(f"{w.url}/v1/responses") as socket,
    ):
        await socket.send_json({**HELLO, "input": "x" * 2000})
        assert (await until_end(socket))[-1]["status"] == 413
        assert (await socket.receive()).data == module.TOO_BIG


async def test_a_silent_socket_is_closed(w: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.bounds, "SOCKET_IDLE_S", 0.0)
    monkeypatch.setattr(module, "TICK_S", 0.01)
    async with aiohttp.ClientSession() as http, http.ws_connect(f"{w.url}/v1/responses") as socket:
        assert (await socket.receive()).data == module.GOING_AWAY


async def test_sockets_have_a_bound_and_give_it_back(tmp_path: Path, renderer: TemplateRenderer) -> None:
    engine = ScriptedEngine(lambda *_: renderer.tokenizer.encode("x<|im_end|>"))
    async with (
        world(tmp_path, renderer, engine, max_in_flight=1, keys={"k": "t"}) as w,
        aiohttp.ClientSession(headers={"authorization": "Bearer k"}) as http,
    ):
        async with http.ws_connect(f"{w.url}/v1/responses") as socket:
            with pytest.raises(aiohttp.WSServerHandshakeError):
                await http.ws_connect(f"{w.url}/v1/responses")
            for _ in range(2):
                await socket.send_json(HELLO)
                assert (await until_end(socket))[-1]["type"] == "response.completed"
        async with asyncio.timeout(60):
            while True:
                try:
                    async with http.ws_connect(f"{w.url}/v1/responses"):
                        break
                except aiohttp.WSServerHandshakeError:
                    await asyncio.sleep(0.01)
        for path, key in (("/v1/responses", "wrong"), ("/v1/chat/completions", "k"), ("/health", "k")):
            with pytest.raises(aiohttp.WSServerHandshakeError):
                await http.ws_connect(f"{w.url}{path}", headers={"authorization": f"Bearer {key}"})


async def test_what_fails_behind_the_first_token_is_an_event(w: World) -> None:
    w.engine.error, w.engine.break_after = EngineUnavailable("gone"), 3
    with pytest.raises(SocketError, match="broke off"):
        await SocketSpeaker(w, (await w.start())["api_key"]).say(["hi"], stream=True)
    (call,) = w.calls()
    assert call["finish_reason"] == "abort"


async def test_a_gateway_that_stops_ends_calls_and_closes_sockets(tmp_path: Path, renderer: TemplateRenderer) -> None:
    engine = ScriptedEngine(lambda *_: renderer.tokenizer.encode("x<|im_end|>"))
    async with aiohttp.ClientSession() as http:
        async with asyncio.timeout(60), world(tmp_path, renderer, engine) as w:
            socket = await http.ws_connect(f"{w.url}/v1/responses")
            await socket.send_json(HELLO)
            assert (await until_end(socket))[-1]["type"] == "response.completed"
        assert (await socket.receive()).type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED)
