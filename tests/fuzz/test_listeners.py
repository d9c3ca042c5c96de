"""Nothing that is sent to a listener harms another call: every route and every listener, times everything bad.

Laws, for every cell: the answer has one of the statuses that the bad thing is worth, in the shape of the route's API,
or the connection ends where nothing whole came; a sound call that runs beside it, on every listener, gets the bytes
that it gets alone; at the end the process, which holds all listeners, answers and has not grown beyond a bound.

`MILLRACE_FUZZ` runs every cell; without, a seed chooses some (`MILLRACE_FUZZ_SEED`). A failure names its cell and the
seed."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import psutil
import pytest
from aiohttp import web
from google.rpc.status_pb2 import Status

from millrace.dialects.all import DIALECTS, MESSAGES, RESPONSES
from millrace.producers.gateway.app import GATEWAY_ROUTES, routes
from millrace.producers.gateway.upstreams import embeddings
from millrace.producers.intake.otlp.app import HEALTH, ROUTES
from tests.fuzz import badness
from tests.fuzz.badness import DROPPED, SOCKET, Answered, Target, cases, frame, frames, send, upgraded
from tests.support.documents import ROOT
from tests.support.imported import logged, traced
from tests.support.otlp_process import KEY
from tests.support.spans import a_call, a_span, an_evaluation

SEED = int(os.environ.get("MILLRACE_FUZZ_SEED") or 1)
CELLS = None if int(os.environ.get("MILLRACE_FUZZ", "0")) else 160
"""how many of them run; None: all"""
AT_ONCE = 8
GROWN_MIB = 192
"""how much the process may have grown: it may hold AT_ONCE bodies of 8 MiB, and what they became"""
USER = {"role": "user", "content": "hi"}
HELLO = {"model": "policy", "messages": [USER], "stream": True}
CALL = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "add", "arguments": {}}}
RESULT = json.dumps({"jsonrpc": "2.0", "id": 1, "result": {"content": [{"type": "text", "text": "7"}]}}).encode()
FAR = [
    b'data: {"id":"chatcmpl-7","choices":[{"index":0,"delta":{"content":"' + str(at).encode() + b'"}}]}\n\n'
    for at in range(30)
] + [b"data: [DONE]\n\n"]
SOUND: dict[str, Any] = {
    "chat": {"model": "m", "messages": [USER]},
    "responses": {"model": "m", "input": "hi"},
    "messages": {"model": "m", "max_tokens": 8, "messages": [USER]},
    "completions": {"model": "m", "prompt": "hi"},
    "count_tokens": {"model": "m", "messages": [USER]},
    "start": {"task_id": "t"},
    "reward": {"value": 1.0},
    "events": {"events": []},
    "end": {},
    "feedback": {"rating": 1.0},
    "embeddings": {"model": "m", "input": "hi"},
}
SENT = {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": {"message": {"parts": []}}}
TASK = {"task": {"id": "t", "status": {"state": "TASK_STATE_COMPLETED"}}}
MINTED = re.compile(rb"chatcmpl-[0-9a-f-]{36}|\"created\":\d+")


async def far(request: web.BaseRequest) -> web.StreamResponse:
    """The upstream, and the server of MCP."""
    with suppress(ConnectionError):
        return await far_answer(request)
    return web.Response(status=400)


async def far_answer(request: web.BaseRequest) -> web.StreamResponse:
    async for _ in request.content.iter_any():
        pass
    if request.path.startswith("/mcp"):
        return web.Response(body=RESULT, content_type="application/json")
    if request.path.endswith("agent-card.json"):
        return web.json_response({"name": "far", "url": f"http://{request.host}/rpc"})
    if request.path.startswith(("/rpc", "/message", "/tasks")):
        return web.json_response({"jsonrpc": "2.0", "id": 1, "result": TASK} if request.path == "/rpc" else TASK)
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for part in FAR:
        await response.write(part)
        await asyncio.sleep(0.004)
    return response


class Listeners:
    """The process under test."""

    def __init__(self, process: subprocess.Popen[bytes], told: dict[str, Any], http: aiohttp.ClientSession) -> None:
        self.process, self.addresses, self.session, self.http = process, told["addresses"], told["session"], http
        self.response = ""
        """an id of tenant one's"""

    def targets(self) -> list[Target]:
        """Every route of every listener, from the code's own lists."""
        out = []
        own = {name for _, _, name in GATEWAY_ROUTES}
        for path, method, name in routes():
            id = "policy" if name == "model" else self.session if "/sessions/" in path else self.response
            path = path.replace("{id:path}", id).replace("{id}", id)
            sound = SOUND[name] if method == "POST" else None
            foreign = sound if "/sessions/" in path else None
            if name == RESPONSES.name:
                foreign = {**sound, "previous_response_id": self.response}
            if name == "feedback":
                foreign = {**sound, "response_id": self.response}
            embeds = name == embeddings.NAME
            out.append(Target("gateway", method, path, sound, foreign=foreign, serves=not embeds))  # engines make none
            if (embeds or name not in own) and method == "POST":
                out.append(Target("door", method, path, sound))
        bodies = {
            "/v1/traces": traced([a_span(1, a_call("q", "a", "r1"))]),
            "/v1/logs": logged([an_evaluation(1, 0.5)]),
        }
        out += [Target("otlp", "POST", path, bodies[path], KEY) for path in ROUTES]
        out.append(Target("otlp", "GET", HEALTH, None, KEY))
        out += [Target("a2a", "POST", path, SENT) for path in ("/rpc", "/message:send", "/tasks/t:cancel")]
        out += [Target("a2a", "GET", path, None) for path in ("/.well-known/agent-card.json", "/tasks/t")]
        return [*out, *(Target("mcp", method, "/mcp", CALL if method == "POST" else None) for method in HTTP)]

    async def sound(self, listener: str, started: asyncio.Event | None = None) -> bytes:
        """A sound call of one listener: all its bytes, but for what is minted for each."""
        url, body, key = {
            "gateway": ("/v1/chat/completions", HELLO, "sk-one"),
            "door": ("/v1/chat/completions", HELLO, "sk-two"),
            "otlp": ("/v1/traces", traced([a_span(1, a_call("q", "a", "r1"))]), KEY),
            "mcp": ("/mcp", CALL, ""),
            "a2a": ("/rpc", SENT, ""),
        }[listener]
        headers = {"authorization": f"Bearer {key}"}
        async with self.http.post(self.addresses[listener] + url, json=body, headers=headers) as answer:
            first = await answer.content.readany()
            if started is not None:
                started.set()
            return str(answer.status).encode() + b" " + MINTED.sub(b"", first + await answer.read())

    def memory(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)


HTTP = ("POST", "GET", "DELETE")
"""the methods of MCP's streamable HTTP"""


@asynccontextmanager
async def listening(folder: Path) -> AsyncIterator[Listeners]:
    runner = web.ServerRunner(web.Server(far), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    command = [sys.executable, "-m", "tests.fuzz.listeners_process", str(folder)]
    process = subprocess.Popen(
        [*command, f"http://127.0.0.1:{runner.addresses[0][1]}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=(folder / "said").open("wb"),
        cwd=ROOT,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = b"["
        while line.startswith(b"["):  # what the server of HTTP says of itself
            line = await asyncio.to_thread(process.stdout.readline)
        assert line, (folder / "said").read_text()[-3000:]
        async with aiohttp.ClientSession() as http:
            yield Listeners(process, json.loads(line), http)
        process.stdin.close()
        await asyncio.to_thread(process.wait, 60)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        await runner.cleanup()


def check_shape(target: Target, got: Answered) -> None:
    """An error is one of the API's, and no header of an answer is the client's."""
    assert all("evil" not in value for _, value in got.headers), got
    if got.status < 400:
        return
    if target.listener in badness.PROXIES:
        assert got.body.strip(), got
        return
    if dict(got.headers)["content-type"] == "application/x-protobuf":
        assert Status.FromString(got.body).message, got
        return
    said = json.loads(got.body)
    if target.listener == "otlp":
        assert set(said) == {"code", "message"}, got
        assert said["message"], got
        return
    if target.path.startswith(MESSAGES.path):
        assert (set(said), set(said["error"])) == ({"type", "error"}, {"type", "message"}), got
    else:
        assert (set(said), set(said["error"])) == ({"error"}, {"message", "type", "param", "code"}), got
    assert said["error"]["message"], got


async def check_route(w: Listeners, target: Target, case: badness.Case) -> int:
    got = await send(w.addresses[target.listener], case)
    assert got.status in case.statuses, got
    if case.ours or got.body:
        check_shape(target, got)
    return got.status


async def check_socket(w: Listeners, r: Random, bad: badness.Frames) -> int:
    """Frames that are bad end the socket, or are told so in an event; the next socket is served."""
    reader, writer, status = await upgraded(w.addresses["gateway"], RESPONSES.path, "sk-one")
    assert status == 101
    told = DROPPED
    try:
        with_all = asyncio.create_task(_told(reader))
        try:
            for data in bad(r):
                writer.write(data)
                await writer.drain()
            await asyncio.wait([with_all], timeout=0.5)
            writer.write_eof()
        except ConnectionError:
            pass
        async with asyncio.timeout(badness.PATIENCE_S):
            for event in await with_all:
                assert (event["type"], bool(event["error"]["message"])) == ("error", True), event
                told = event["status"]
                assert 400 <= told < 500, event
    finally:
        writer.transport.abort()
    reader, writer, status = await upgraded(w.addresses["gateway"], RESPONSES.path, "sk-one")
    writer.write(frame(json.dumps({"type": "response.create", "model": "m", "input": "hi"}).encode()))
    async with asyncio.timeout(badness.PATIENCE_S):
        async for kind, data in frames(reader):
            if kind == 1 and json.loads(data)["type"] == "response.completed":
                break
        else:
            raise AssertionError("the socket ended before its reply")
    writer.transport.abort()
    return int(told)


async def _told(reader: asyncio.StreamReader) -> list[dict[str, Any]]:
    return [json.loads(data) async for kind, data in frames(reader) if kind == 1]


@pytest.mark.slow
@pytest.mark.timeout(0 if CELLS is None else 300)
async def test_bad_input_disturbs_no_other_call_and_takes_no_memory(tmp_path: Path) -> None:
    r = Random(SEED)
    bomb = gzip.compress(b"\0" * badness.HUGE, 9)
    seen: Counter[str] = Counter()
    wrong: list[str] = []
    async with listening(tmp_path) as w:
        w.response = await a_response(w)
        alone = {name: await w.sound(name) for name in w.addresses}
        assert all(said.startswith(b"200 ") for said in alone.values()), alone
        cells: list[tuple[str, Any]] = []
        for target in w.targets():
            found = cases(target, r, bomb)
            cells += [(f"{target.name}: {name}", (check_route, target, case)) for name, case in found.items()]
        cells += [(f"socket: {name}", (check_socket, r, bad)) for name, bad in SOCKET.items()]
        r.shuffle(cells)
        total = len(cells)
        cells = cells[:CELLS]
        before = most = w.memory()
        for start in range(0, len(cells), AT_ONCE):
            batch = cells[start : start + AT_ONCE]
            started = asyncio.Event()
            beside = {
                name: asyncio.create_task(w.sound(name, started if name == "gateway" else None)) for name in alone
            }
            await started.wait()
            work = [check(w, *given) for _, (check, *given) in batch]
            for (name, _), result in zip(batch, await asyncio.gather(*work, return_exceptions=True), strict=True):
                if isinstance(result, BaseException):
                    wrong.append(f"{name}: {type(result).__name__} {str(result)[:400]}")
                else:
                    seen[str(result or "dropped")] += 1
            for name, task in beside.items():
                if await task != alone[name]:
                    wrong.append(f"{name} was disturbed by {[cell for cell, _ in batch]}: {(await task)[-300:]!r}")
            most = max(most, w.memory())
        for name, said in alone.items():
            assert await w.sound(name) == said
        for name in ("gateway", "door", "otlp"):
            async with w.http.get(f"{w.addresses[name]}/health") as answer:
                assert (answer.status, (await answer.json())["status"]) == (200, "ok")
        grown = {"at most": most - before >> 20, "at the end": w.memory() - before >> 20}
        print(f"{len(cells)} of {total} cells, seed {SEED}: {dict(seen)}; MiB before {before >> 20}, grown {grown}")
    said = (tmp_path / "said").read_text()
    assert not wrong, f"seed {SEED}:\n" + "\n".join(wrong)
    assert "Traceback" not in said, said[-5000:]
    assert grown["at most"] < GROWN_MIB, grown


async def a_response(w: Listeners) -> str:
    """The id of a response that is tenant one's."""
    headers = {"authorization": "Bearer sk-one"}
    async with w.http.post(w.addresses["gateway"] + RESPONSES.path, json=SOUND["responses"], headers=headers) as answer:
        return str((await answer.json())["id"])


def test_every_dialect_and_route_has_a_sound_body() -> None:
    """Else its cells would be bad for another reason."""
    assert {name for _, method, name in routes() if method == "POST"} == set(SOUND)
    assert {dialect.name for dialect in DIALECTS} <= set(SOUND)
