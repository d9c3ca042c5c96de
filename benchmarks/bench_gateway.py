"""What the gateway adds: the same chat calls through it and straight to a fake instant engine, in one run.

    python -m benchmarks.bench_gateway [--seconds 4] [--tokens 50] [--processes 2]

Three processes share the machine: the fake engine (token ids in and out, the shape of vLLM's generate route), the
gateway with its capture log on disk, and this load generator (closed loop, keep-alive). `direct` posts what the gateway
would post to the engine; `gateway` posts a chat request of an open session. The forwarder sends to a bus that keeps
nothing. With `--processes` a gateway of so many is compared with the one, and a hop between two is timed
(`benchmarks.gateway_processes`)."""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from statistics import quantiles
from typing import Any

import aiohttp
import orjson
import psutil
import uvloop

from benchmarks import gateway_processes
from millrace.infra.log.base import Outgoing, Place, Publisher
from millrace.infra.log.memory.bus import MemoryBus
from millrace.infra.process.net import free_ports

WARM = 200
START_S = 120.0
CHARACTERS = 2000
WORDS = ("weather", "Zürich", "today?", "check.", "answer", "me", "in", "What", "Let", "42.", "is", "the")
STREAMED = re.compile(rb'"stream": ?true')
Shot = Callable[[int], Awaitable[None]]


def engine(port: int, tokens: int, pause_s: float = 0.0) -> None:
    """The fake instant engine: every answer is there before it was asked for. It also speaks chat completions. With a
    pause, events of a stream come one at a time."""
    from aiohttp import web

    ids = [300 + at % 50 for at in range(tokens - 1)] + [2]
    content = [{"token_id": id, "logprob": -0.5, "rank": 1} for id in ids]
    spans = [{"version": "policy@0", "start": 0, "end": tokens}]
    usage = {"prompt_tokens": 10, "completion_tokens": tokens}
    choice = {"index": 0, "finish_reason": "stop", "stop_reason": None, "weight_versions": spans}
    whole = orjson.dumps({"choices": [{**choice, "token_ids": ids, "logprobs": {"content": content}}], "usage": usage})
    parts = [
        orjson.dumps({"choices": [{"index": 0, "token_ids": [id], "logprobs": {"content": [token]}}]})
        for id, token in zip(ids[:-1], content[:-1], strict=True)
    ]
    last = orjson.dumps({"choices": [{**choice, "token_ids": ids[-1:], "logprobs": {"content": content[-1:]}}]})
    end = orjson.dumps({"choices": [], "usage": usage})
    events = [b"data: " + part + b"\n\n" for part in [*parts, last, end, b"[DONE]"]]

    def answering(whole: bytes, events: list[bytes]) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def answered(request: web.Request) -> web.StreamResponse:
            if not STREAMED.search(await request.read()):
                return web.Response(body=whole, content_type="application/json")
            answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await answer.prepare(request)
            for event in events:
                await answer.write(event)
                if pause_s:
                    await asyncio.sleep(pause_s)
            return answer

        return answered

    app = web.Application()
    app.add_routes([web.post("/inference/v1/generate", answering(whole, events))])
    app.add_routes([web.post("/v1/chat/completions", answering(*_chat(tokens)))])
    uvloop.install()
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None)


def _chat(tokens: int) -> tuple[bytes, list[bytes]]:
    """A reply of so many words as chat completions have it, whole and streamed."""
    head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m"}
    usage = {"prompt_tokens": 10, "completion_tokens": tokens, "total_tokens": 10 + tokens}
    message = {"role": "assistant", "content": "word " * tokens}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    whole = orjson.dumps({**head, "choices": [choice], "usage": usage})
    deltas: list[dict[str, Any]] = [{"content": "word "}] * tokens
    chunks = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    chunks.append({"index": 0, "delta": {}, "finish_reason": "stop"})
    head["object"] = "chat.completion.chunk"
    events = [orjson.dumps({**head, "choices": [chunk]}) for chunk in chunks]
    return whole, [b"data: " + event + b"\n\n" for event in [*events, b"[DONE]"]]


class Forgetful(MemoryBus):
    """A log that takes everything and keeps nothing, so that what a process holds is its own."""

    def publisher(self, *, gapless: bool = False) -> Publisher:
        return Nowhere()


class Nowhere(Publisher):
    """Says of every record at once that it is there."""

    def __init__(self) -> None:
        self._count = 0

    def publish(self, out: Outgoing) -> Future[Place]:
        placed: Future[Place] = Future()
        placed.set_result(Place(out.topic, 0, self._count))
        self._count += 1
        return placed

    def flush(self, timeout_s: float = 30.0) -> None:
        """There is nothing to wait for."""


def gateway(port: int, engine_url: str, folder: Path, tokenizer: Path, layout: tuple[int, int] = (0, 1)) -> None:
    """The gateway, whole but for Kafka. `layout`: its index among so many processes."""
    from millrace.dialects.rendering.template import TemplateRenderer
    from millrace.dialects.rendering.tokenizer import ChatTokenizer
    from millrace.infra.engines.vllm.engine import VllmEngine
    from millrace.infra.gateway_processes import folder_of
    from millrace.infra.log.base import TopicSpec
    from millrace.infra.log.blobs import ClaimStore
    from millrace.producers.capture.forwarder import Forwarder
    from millrace.producers.capture.log import CaptureLog
    from millrace.producers.gateway.calls.fleet import Fleet
    from millrace.producers.gateway.calls.gateway import Gateway
    from millrace.producers.gateway.options import GatewayOptions
    from millrace.producers.gateway.processes.crossing import Crossing
    from millrace.producers.gateway.processes.hop import Hops
    from millrace.producers.gateway.processes.owner import ProcessLayout
    from millrace.producers.gateway.serve import serve, spare_collector
    from millrace.producers.gateway.sessions.recorder import Recorder
    from millrace.producers.gateway.sessions.sessions import Sessions

    async def run() -> None:
        sys.setswitchinterval(0.0005)
        index, processes = layout
        log = CaptureLog(folder_of(folder, index))
        bus = Forgetful()
        bus.ensure_topics([TopicSpec("t.raw", 2)])
        forwarder = Forwarder(log, bus, "t.raw", ClaimStore(str(folder / "claims")))
        forwarder.start()
        fleet = Fleet("policy", VllmEngine, (engine_url,))
        renderer = TemplateRenderer(ChatTokenizer(tokenizer))
        sessions = Sessions(log.folder, "policy", "a secret of all", index=index)
        served = Gateway(GatewayOptions("policy"), sessions, Recorder(log), fleet, renderer)
        crossing = (
            Crossing(served, ProcessLayout(index, processes), Hops(folder, folder), folder) if processes > 1 else None
        )
        spare_collector()
        await serve(served, "127.0.0.1", port, asyncio.Event(), None, None, crossing)

    uvloop.run(run())


def passthrough(port: int, engine_url: str, path: str = "/inference/v1/generate") -> None:
    """What forwarding alone costs: every byte goes to the engine, every byte of its answer comes back."""
    from granian.constants import Interfaces
    from granian.log import LogLevels
    from granian.server.embed import Server

    session: aiohttp.ClientSession | None = None

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal session
        session = session or aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        async with session.post(engine_url + path, data=body) as answer:
            headers = [(b"content-type", answer.headers["content-type"].encode())]
            await send({"type": "http.response.start", "status": answer.status, "headers": headers})
            async for part in answer.content.iter_any():
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def run() -> None:
        server = Server(app, "127.0.0.1", port, interface=Interfaces.ASGINL, log_level=LogLevels.warning)
        await server.serve()

    uvloop.run(run())


async def measure(shot: Shot, at_once: int, seconds: float) -> tuple[float, float, float]:
    """(p50 ms, p99 ms, requests/s) of a closed loop."""
    times: list[float] = []
    end = time.perf_counter() + seconds

    async def loop(number: int) -> None:
        while time.perf_counter() < end or len(times) < 2:  # of one there are no percentiles
            began = time.perf_counter()
            await shot(number)
            times.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(loop(number) for number in range(at_once)))
    cuts = quantiles(times, n=100)
    return cuts[49] * 1e3, cuts[98] * 1e3, len(times) / (time.perf_counter() - began)


async def load(engine_url: str, gateway_url: str, bare_url: str, pids: list[int], seconds: float, tokens: int) -> None:
    """Measure and print. `pids` are those of the gateway and of the bare pass-through."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        keys = [await _session(http, gateway_url) for _ in range(64)]
        text = "What is the weather in Zürich today? " * 8
        count = 0

        async def post(url: str, body: bytes, headers: dict[str, str]) -> None:
            async with http.post(url, data=body, headers={"content-type": "application/json", **headers}) as answer:
                assert answer.status == 200, await answer.text()
                async for _ in answer.content.iter_any():
                    pass

        def direct(stream: bool) -> Shot:
            params = {"max_tokens": tokens, "temperature": 1.0, "logprobs": 0}
            ids = {"token_ids": list(range(100, 260)), "sampling_params": params, "stream": stream}
            body = orjson.dumps(ids)
            return lambda number: post(f"{engine_url}/inference/v1/generate", body, {})

        def through(stream: bool) -> Shot:
            async def shot(number: int) -> None:
                nonlocal count
                count += 1
                messages = [{"role": "user", "content": f"{count} {text}"}]
                body = orjson.dumps({"model": "m", "messages": messages, "max_tokens": tokens, "stream": stream})
                await post(f"{gateway_url}/v1/chat/completions", body, {"authorization": f"Bearer {keys[number]}"})

            return shot

        print(f"{tokens} tokens a reply, {len(text)} characters a prompt, {os.cpu_count()} cores, capture on")
        print(f"{'':12}{'at once':>8} | {'direct p50':>10} {'p99':>7} {'req/s':>7} | {'gateway p50':>11} {'p99':>7} "
              f"{'req/s':>7} | {'added p50':>9} {'ratio req/s':>11}")  # fmt: skip
        process, bare = map(psutil.Process, pids)
        for stream in (False, True):
            for shot in (direct(stream), through(stream)):
                for _ in range(WARM):
                    await shot(0)
            before, cpu = count, _cpu(process)
            for at_once in (1, 16, 64):
                d50, d99, drate = await measure(direct(stream), at_once, seconds)
                g50, g99, grate = await measure(through(stream), at_once, seconds)
                print(f"{'streamed' if stream else 'plain':12}{at_once:>8} | {d50:>10.2f} {d99:>7.2f} {drate:>7.0f} | "
                      f"{g50:>11.2f} {g99:>7.2f} {grate:>7.0f} | {g50 - d50:>9.2f} {grate / drate:>11.2f}")  # fmt: skip
            spent = (_cpu(process) - cpu) / (count - before)
            print(f"{'':12}gateway: {spent * 1e3:.2f} ms of CPU a call, {process.memory_info().rss >> 20} MiB resident")

        await _costs(post, gateway_url, bare_url, keys, process, bare, seconds, tokens)


async def _costs(
    post: Callable[[str, bytes, dict[str, str]], Awaitable[None]],
    gateway_url: str,
    bare_url: str,
    keys: list[str],
    gateway: psutil.Process,
    bare: psutil.Process,
    seconds: float,
    tokens: int,
) -> None:
    """CPU milliseconds a call, of the gateway and of a bare pass-through."""
    count = 0

    def question() -> str:
        words = " ".join(WORDS[(count * 7 + at * at + at // 5) % len(WORDS)] for at in range(400))
        return f"{count} {words}"[:CHARACTERS]

    def chat(stream: bool) -> Shot:
        async def shot(number: int) -> None:
            nonlocal count
            count += 1
            messages = [{"role": "user", "content": question()}]
            body = orjson.dumps({"model": "m", "messages": messages, "max_tokens": tokens, "stream": stream})
            await post(f"{gateway_url}/v1/chat/completions", body, {"authorization": f"Bearer {keys[number]}"})

        return shot

    def forward(stream: bool) -> Shot:
        async def shot(number: int) -> None:
            nonlocal count
            count += 1
            await post(bare_url, orjson.dumps({"prompt": question(), "stream": stream}), {})

        return shot

    print(f"\nCPU ms a call, 8 at once, requests of {CHARACTERS} characters, all of them new, {tokens} tokens a reply")
    print(f"{'':12} | {'pass-through':>12} | {'gateway':>8} | {'added':>6} | {'ratio':>6}")
    for stream in (False, True):
        spent = []
        for process, shot in ((bare, forward(stream)), (gateway, chat(stream))):
            for _ in range(WARM):
                await shot(0)
            before, cpu = count, _cpu(process)
            await measure(shot, 8, seconds)
            spent.append((_cpu(process) - cpu) / (count - before) * 1e3)
        name = "streamed" if stream else "plain"
        alone, ours = spent
        print(f"{name:12} | {alone:>12.2f} | {ours:>8.2f} | {ours - alone:>6.2f} | {ours / alone:>6.1f}")


async def _compared(one: str, urls: list[str], pids: list[int], count: int, seconds: float, tokens: int) -> None:
    several, *doors = urls
    async with aiohttp.ClientSession() as http:
        for url in urls:
            await _session(http, url)
    for pid in pids[2 : 2 + count]:  # one port says nothing of each
        while not any(at.laddr.port == int(several.rpartition(":")[2]) for at in psutil.Process(pid).net_connections()):
            await asyncio.sleep(0.02)
    groups = pids[:1], pids[2 : 2 + count]
    await gateway_processes.compare(measure, one, several, doors, groups, seconds, tokens)


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def _session(http: aiohttp.ClientSession, url: str) -> str:
    deadline = time.perf_counter() + START_S
    while True:
        try:
            async with http.post(f"{url}/v1/sessions", json={}) as answer:
                return str((await answer.json())["api_key"])
        except aiohttp.ClientError:
            if time.perf_counter() > deadline:
                raise SystemExit(f"the gateway did not come up in {START_S:.0f} s") from None
            await asyncio.sleep(0.02)


def main() -> None:
    """Start the processes and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4.0, help="length of each measurement")
    parser.add_argument("--tokens", type=int, default=50, help="tokens of a reply")
    parser.add_argument("--processes", type=int, default=1, help="compare a gateway of so many with one of one")
    given = parser.parse_args()
    from tests.support import chat_tokenizer

    first, second, third = free_ports(3)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = chat_tokenizer.write(folder / "tokenizer")
        engine_url, gateway_url = f"http://127.0.0.1:{first}", f"http://127.0.0.1:{second}"
        processes = [
            context.Process(target=engine, args=(first, given.tokens), daemon=True),
            context.Process(target=gateway, args=(second, engine_url, folder / "capture", tokenizer), daemon=True),
            context.Process(target=passthrough, args=(third, engine_url), daemon=True),
        ]
        urls: list[str] = []
        if given.processes > 1:
            shared, *own = free_ports(3)
            urls = [f"http://127.0.0.1:{port}" for port in (shared, *own)]
            places = [("several", shared, (index, given.processes)) for index in range(given.processes)]
            places += [("doors", port, (index, 2)) for index, port in enumerate(own)]
            for name, port, layout in places:
                args = (port, engine_url, folder / name / "capture", tokenizer, layout)
                processes.append(context.Process(target=gateway, args=args, daemon=True))
        for process in processes:
            process.start()
        try:
            pids = [process.pid for process in processes[1:] if process.pid is not None]
            bare_url = f"http://127.0.0.1:{third}"
            uvloop.run(load(engine_url, gateway_url, bare_url, pids[:2], given.seconds, given.tokens))
            if urls:
                uvloop.run(_compared(gateway_url, urls, pids, given.processes, given.seconds, given.tokens))
        finally:
            for process in processes:
                process.kill()
                process.join()


if __name__ == "__main__":
    main()
