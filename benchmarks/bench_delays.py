"""How long one request, or one reply, keeps the gateway from everybody else: the longest step by shape, against 50 ms.

    .venv/bin/python -m benchmarks.bench_delays [--repeats 3] [--only TEXT]

A ticker asks the event loop for its turn again and again while one call of a shape is served. What others would have
waited for between two of its turns is the CPU of the loop's own thread, and that of the gateway's other threads while
the loop waited for the interpreter's lock. While it waited for a core they had the other one, or a busy machine had
both: that is no delay of the gateway's making. The gateway is whole but for its port, its engine answers at once. The
smallest of some repeats is printed: what a busy machine adds comes only sometimes."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import uvloop

from benchmarks.delay_shapes import RESPONSES, SHAPES, Shape, chat
from millrace.dialects.rendering.template import TemplateRenderer
from millrace.dialects.rendering.tokenizer import ChatTokenizer
from millrace.producers.gateway.upstreams.routes import RouteRule
from millrace.producers.gateway.upstreams.upstreams import ONE
from tests.support import chat_tokenizer
from tests.support.in_process import Far, InProcess, Played

LIMIT_MS = 50.0
CONTEXT = 1 << 20
CHAT = "/v1/chat/completions"
END = 2


def reply(shape: Shape, ids: list[int]) -> Callable[[bytes], Played]:
    """The engine of a shape, whose answer lies ready."""
    whole, pieces = (upstream if shape.upstream else engine)(shape, ids)
    return lambda body: pieces if b'"stream":true' in body[-2000:] else whole


def engine(shape: Shape, ids: list[int]) -> tuple[Played, Played]:
    """What vLLM's generate route answers, plain and streamed."""
    rivals = [{"token_id": at, "logprob": -1.0, "rank": at} for at in range(1 + shape.rivals)]
    content = [{"token": f"token_id:{id}", "logprob": -0.5, "bytes": None, "top_logprobs": rivals} for id in ids]
    spans = [{"version": "policy@0", "start": 0, "end": len(ids)}]
    last = {"finish_reason": "stop", "weight_versions": spans}
    whole = {"token_ids": ids, "logprobs": {"content": content}, **last}
    choices = [{"index": index, **whole} for index in range(shape.n)]
    step = -(-len(ids) // shape.pieces)
    parts: list[dict[str, Any]] = [
        {"token_ids": ids[at : at + step], "logprobs": {"content": content[at : at + step]}}
        for at in range(0, len(ids), step)
    ]
    parts[-1] = {**parts[-1], **last}
    told = [orjson.dumps({"choices": [{"index": at, **part}]}) for at in range(shape.n) for part in parts]
    events = b"".join([b"data: " + event + b"\n\n" for event in (*told, b"[DONE]")])
    size = 2 << 20  # what aiohttp hands over at once where much lies ready
    streamed = [events[at : at + size] for at in range(0, len(events), size)]
    return Played(parts=[orjson.dumps({"choices": choices})]), Played(parts=streamed)


def upstream(shape: Shape, ids: list[int]) -> tuple[Played, Played]:
    """What an OpenAI-compatible server answers, plain and streamed."""
    words = "reply " * shape.tokens
    choices = [{"index": at, "message": {"role": "assistant", "content": words}} for at in range(shape.n)]
    step = len(words) // shape.pieces
    pieces = [words[at : at + step] for at in range(0, len(words), step)]
    told = [orjson.dumps({"choices": [{"index": 0, "delta": {"content": piece}}]}) for piece in pieces]
    events = [b"data: " + event + b"\n\n" for event in (*told, b"[DONE]")]
    return Played(parts=[orjson.dumps({"choices": choices})]), Played(parts=events)


class Moment(NamedTuple):
    """Seconds: of the clock, of CPU of the process and of this thread, and those that this thread waited for a core."""

    wall: float
    process: float
    thread: float
    queued: float

    def held(self, before: Moment) -> float:
        """How long the process itself kept this thread since then, at most."""
        wall, process, thread, queued = (now - then for now, then in zip(self, before, strict=True))
        return thread + max(0.0, min(process - thread, wall - thread - queued))


class Clock:
    """Tells the moment of the thread that made it. Linux says how long it waited for a core; others count none."""

    def __init__(self) -> None:
        self._file = -1
        with suppress(OSError):
            self._file = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)

    def now(self) -> Moment:
        queued = int(os.pread(self._file, 100, 0).split()[1]) / 1e9 if self._file >= 0 else 0.0
        return Moment(time.perf_counter(), time.process_time(), time.thread_time(), queued)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)


async def longest(folder: Path, renderer: TemplateRenderer, shape: Shape) -> tuple[int, float, float]:
    """(status, longest step in ms, CPU ms of the whole call)."""
    line = renderer.tokenizer.encode("The answer is 42, and so on. ")
    ids = (line * (shape.tokens // len(line) + 1))[: shape.tokens - 1]
    body, worst, done = shape.body(), 0.0, False
    script, far = reply(shape, [*ids, END]), None
    if shape.far is not None:
        answer = Played(parts=[shape.far()])
        far = Far([RouteRule("far", ONE)], lambda path, asked: answer)
    gateway = InProcess(folder, renderer, script, upstream=shape.upstream, far=far, max_model_len=CONTEXT)

    clock = Clock()

    async def tick() -> None:
        nonlocal worst
        before = clock.now()
        while not done:
            await asyncio.sleep(0)
            now = clock.now()
            worst, before = max(worst, now.held(before)), now

    path = shape.path or CHAT
    if path in ("events", "reward", "end"):
        started = await gateway.ask("POST", "/v1/sessions", b"{}")
        path = f"/v1/sessions/{started.json['session']}/{path}"
    headers = {"x-millrace-session": shape.named} if shape.named else {}
    await gateway.ask("POST", CHAT, chat(n=shape.n), headers)
    if shape.before:
        body = await told_before(gateway, shape)
    gc.collect()
    gc.freeze()
    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0.01)
    worst, began = 0.0, time.process_time()
    if shape.frame:
        got = await gateway.frames(path, [body])
        status = got.events[-1].get("status", 200) if got.events[-1]["type"] == "error" else 200
    else:
        status = (await gateway.ask("POST", path, body)).status
    await asyncio.sleep(0.01)
    spent, done = time.process_time() - began, True
    await ticking
    clock.close()
    await gateway.close()
    return status, worst * 1e3, spent * 1e3


async def told_before(gateway: InProcess, shape: Shape) -> bytes:
    """The body of the turn behind `before` others of one conversation, each of a part of the largest body."""
    body, turn = orjson.loads(shape.body()), ""
    for _ in range(shape.before):
        more = {"previous_response_id": turn} if turn else {}
        answer = await gateway.ask("POST", RESPONSES, orjson.dumps({**body, **more}))
        assert answer.status == 200, answer.body[:300]
        turn = answer.json["id"]
    return orjson.dumps({**body, "previous_response_id": turn})


async def measure(repeats: int, only: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, number = Path(name), 0
        renderer = TemplateRenderer(ChatTokenizer(chat_tokenizer.write(folder / "tokenizer")))
        print(f"{'':52} | {'status':>6} | {'longest step':>12} | {'of 50 ms':>8} | {'CPU of it all':>13}")
        for said_of, shape in SHAPES.items():
            if only not in said_of:
                continue
            found = []
            for _ in range(repeats):
                number += 1
                found.append(await longest(folder / str(number), renderer, shape))
            status, worst, spent = min(found, key=lambda one: one[1])
            print(f"{said_of:52} | {status:>6} | {worst:>9.1f} ms | {worst / LIMIT_MS:>8.2f} | {spent:>10.0f} ms")


def main() -> None:
    """Measure every shape and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="shapes whose name holds this text")
    given = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    sys.setswitchinterval(0.0005)
    with suppress(KeyboardInterrupt):
        uvloop.run(measure(given.repeats, given.only))


if __name__ == "__main__":
    main()
