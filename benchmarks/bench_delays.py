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

from millrace.producers.gateway.rendering.template import TemplateRenderer
from millrace.producers.gateway.rendering.tokenizer import ChatTokenizer
from millrace.schemas import bounds
from tests.support import chat_tokenizer
from tests.support.in_process import InProcess, Played

LIMIT_MS = 50.0
LARGEST = (8 << 20) - 4096
REPORT = bounds.REPORT_BYTES - 4096
CONTEXT = 1 << 20
CHAT = "/v1/chat/completions"
END = 2
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


class Shape(NamedTuple):
    """One call: its body, the tokens of its reply and how they come. `path`: "" stands for a chat call."""

    body: Callable[[], bytes]
    tokens: int = 20
    pieces: int = 1
    path: str = ""
    upstream: bool = False
    n: int = 1
    rivals: int = 0


def chat(**fields: Any) -> bytes:
    return orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1000, **fields})


def said(text: str, **fields: Any) -> bytes:
    return chat(messages=[{"role": "user", "content": text}], **fields)


def raw(text: bytes) -> bytes:
    """A message whose text is given as it stands in JSON."""
    return chat(messages=[{"role": "user", "content": "@"}]).replace(b"@", text)


def many(count: int, size: int) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[at % 2], "content": f"{at} " + "x" * size} for at in range(count)] + [
        {"role": "user", "content": "hi"}
    ]


def echoed(arguments: Any) -> bytes:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    return chat(messages=[*talk, {"role": "tool", "tool_call_id": "c", "content": "7"}], tools=[TOOL])


def events(count: int, size: int) -> bytes:
    return orjson.dumps({"events": [{"kind": "observation", "content": "x" * size}] * count})


VALUES = bounds.VALUES - 500
WORDS = "".join(chr(0x61 + at * 7 % 26) if at % 6 else " " for at in range(LARGEST // 2))
SHAPES = {
    "2 KB of text": Shape(lambda: said("word " * 400)),
    "15 KB of text": Shape(lambda: said(WORDS[: 15 << 10])),
    "1 MB of text": Shape(lambda: said(WORDS[: 1 << 20])),
    "4 MB of text": Shape(lambda: said(WORDS)),
    "8 MB, one letter": Shape(lambda: said("x" * LARGEST)),
    "8 MB of letters with accents": Shape(lambda: said("ü" * (LARGEST // 2))),
    "8 MB of escapes": Shape(lambda: raw(b"\\n" * (LARGEST // 2))),
    "8 MB of escaped letters": Shape(lambda: raw(b"\\u00fc" * (LARGEST // 6))),
    "8 MB of a special token": Shape(lambda: said("<|im_end|>" * (LARGEST // 10))),
    "8 MB in metadata": Shape(lambda: chat(metadata={"a": "x" * LARGEST})),
    "8 MB of blanks": Shape(lambda: chat().replace(b"{", b"{" + b" " * LARGEST, 1)),
    "9,000 messages": Shape(lambda: chat(messages=many(9000, 20))),
    "9,000 long messages": Shape(lambda: chat(messages=many(9000, 800))),
    "19,000 messages": Shape(lambda: chat(messages=many(19000, 1))),
    "9,000 tools": Shape(lambda: chat(tools=[TOOL] * 9000)),
    "a tool of 99,000 numbers": Shape(lambda: chat(tools=[{**TOOL, "x": list(range(VALUES))}])),
    "a tool of 49,000 names": Shape(lambda: chat(tools=[{**TOOL, "x": {f"n{i}": i for i in range(VALUES // 2)}}])),
    "metadata of 99,000 lists": Shape(lambda: chat(metadata={"a": [[]] * (VALUES // 2)})),
    "8 MB of small values": Shape(lambda: chat(metadata={"a": [[]] * (LARGEST // 3)})),
    "echoed arguments, 99,000 numbers": Shape(lambda: echoed({"a": list(range(VALUES))})),
    "echoed arguments in text, 2.7 million lists": Shape(lambda: echoed("[" + "[]," * (LARGEST // 3) + "1]")),
    "echoed arguments in text, 8 MB number": Shape(lambda: echoed('{"a": ' + "9" * LARGEST + "}")),
    "echoed arguments in text, 8 MB string": Shape(lambda: echoed('{"a": "' + "x" * LARGEST + '"}')),
    "256 KB with 30 choices": Shape(
        lambda: chat(n=30, messages=[{"role": "user", "content": WORDS[: 256 << 10]}]), n=30
    ),
    "60 KB with 128 choices": Shape(
        lambda: chat(n=128, messages=[{"role": "user", "content": WORDS[: 60 << 10]}]), n=128
    ),
    "128 choices of 1,000 tokens": Shape(lambda: chat(n=128, max_tokens=1000), 1000, n=128),
    "128 choices of up to 10,000 tokens": Shape(lambda: chat(n=128, max_tokens=10_000), 1000, 100, n=128),
    "reply of 60,000 tokens": Shape(lambda: chat(max_tokens=100_000), 60_000),
    "reply of 60,000 tokens, streamed at once": Shape(lambda: chat(max_tokens=100_000, stream=True), 60_000),
    "reply of 60,000 tokens, streamed in 600": Shape(lambda: chat(max_tokens=100_000, stream=True), 60_000, 600),
    "reply of 6,500 tokens with rivals": Shape(
        lambda: chat(max_tokens=6_500, logprobs=True, top_logprobs=19), 6_500, 3000, rivals=19
    ),
    "reply of 6,500 tokens with rivals, streamed at once": Shape(
        lambda: chat(max_tokens=6_500, logprobs=True, top_logprobs=19, stream=True), 6_500, rivals=19
    ),
    "an episode with a 2 MB task": Shape(lambda: orjson.dumps({"task": "x" * REPORT}), path="/v1/sessions"),
    "an episode with a task of 99,000 numbers": Shape(
        lambda: orjson.dumps({"task": list(range(VALUES))}), path="/v1/sessions"
    ),
    "an event of 2 MB": Shape(lambda: events(1, REPORT), path="events"),
    "1,024 events of 2 KB": Shape(lambda: events(1024, 2000), path="events"),
    "a reward with a 2 MB critique": Shape(lambda: orjson.dumps({"critique": "x" * REPORT}), path="reward"),
    "an end with a 2 MB output": Shape(lambda: orjson.dumps({"output": "x" * REPORT}), path="end"),
    "to an upstream: 8 MB of text": Shape(lambda: said("x" * LARGEST), upstream=True),
    "to an upstream: 9,000 messages": Shape(lambda: chat(messages=many(9000, 20)), upstream=True),
    "from an upstream: 8 MB": Shape(lambda: chat(), LARGEST // 8, upstream=True),
    "from an upstream: 100 choices of 60 KB": Shape(lambda: chat(), 10_000, upstream=True, n=100),
    "from an upstream: 8 MB streamed in 4": Shape(lambda: chat(stream=True), LARGEST // 8, 4, upstream=True),
}


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
    gateway = InProcess(folder, renderer, reply(shape, [*ids, END]), upstream=shape.upstream, max_model_len=CONTEXT)

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
    await gateway.ask("POST", CHAT, chat(n=shape.n))
    gc.collect()
    gc.freeze()
    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0.01)
    worst, began = 0.0, time.process_time()
    answer = await gateway.ask("POST", path, body)
    await asyncio.sleep(0.01)
    spent, done = time.process_time() - began, True
    await ticking
    clock.close()
    await gateway.close()
    return answer.status, worst * 1e3, spent * 1e3


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
