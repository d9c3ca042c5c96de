"""One call never keeps the others waiting: between two turns of the event loop it does a bounded amount of work.

Work is counted as calls of functions, Python's and C's, in the event loop's own thread, so that no clock decides;
`benchmarks/bench_delays.py` measures the same law in CPU time."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from millrace.dialects import match_keys, shape
from millrace.dialects.rendering.template import TemplateRenderer
from millrace.infra.process.offload import HEAVY
from millrace.producers.gateway.calls.choice import slices
from millrace.schemas import bounds
from tests.support.in_process import InProcess, Played

CHAT = "/v1/chat/completions"
MOST = 30_000
"""calls of functions between two turns; each takes some tenths of a microsecond"""
USER = {"role": "user", "content": "hi"}


class Turns:
    """Counts the calls of functions between two turns of the loop, in the thread that it is used in."""

    def __init__(self) -> None:
        self.most = 0
        self._count = 0
        self._done = False

    def _called(self, frame: Any, event: str, argument: Any) -> None:
        self._count += event in ("call", "c_call")

    async def _turn(self) -> None:
        while not self._done:
            self.most, self._count = max(self.most, self._count), 0
            await asyncio.sleep(0)

    async def during(self, work: Callable[[], Any]) -> Any:
        turning = asyncio.create_task(self._turn())
        await asyncio.sleep(0)
        sys.setprofile(self._called)
        try:
            return await work()
        finally:
            await asyncio.sleep(0)
            sys.setprofile(None)
            self._done = True
            await turning


def whole(ids: list[int], n: int) -> dict[str, Any]:
    content = [{"logprob": -0.5, "top_logprobs": []}] * len(ids)
    spans = [{"version": "policy@0", "start": 0, "end": len(ids)}]
    one = {"token_ids": ids, "logprobs": {"content": content}, "finish_reason": "stop", "weight_versions": spans}
    return {"choices": [{"index": index, **one} for index in range(n)]}


def chat(**fields: Any) -> bytes:
    return orjson.dumps({"model": "m", "messages": [USER], **fields})


def events(parts: list[bytes]) -> bytes:
    return b"".join(b"data: " + part + b"\n\n" for part in [*parts, b"[DONE]"])


def make_gateway(folder: Path, renderer: TemplateRenderer, *, tokens: int = 20, upstream: bool = False) -> InProcess:
    line = renderer.tokenizer.encode("The answer is 42, and so on. ")
    ids = [*(line * (tokens // len(line) + 1))[: tokens - 1], 2]

    def engine(body: bytes) -> Played:
        asked = orjson.loads(body)
        message = orjson.dumps(whole(ids, asked["sampling_params"]["n"]))
        return Played(parts=[events([message]) if asked["stream"] else message])

    def text(body: bytes) -> Played:
        delta = {"choices": [{"index": 0, "delta": {"content": "some words "}}]}
        return Played(parts=[events([orjson.dumps(delta)] * tokens)])

    return InProcess(folder, renderer, text if upstream else engine, upstream=upstream, max_model_len=1 << 20)


async def most_of(gateway: InProcess, path: str, body: bytes, status: int = 200) -> int:
    turns = Turns()
    answer = await turns.during(lambda: gateway.ask("POST", path, body))
    assert answer.status == status, answer.body[:500]
    return turns.most


@pytest.mark.parametrize(
    ("tokens", "body"),
    [
        pytest.param(20_000, chat(max_tokens=100_000, stream=True), id="streamed at once"),
        pytest.param(20_000, chat(max_tokens=200_000), id="plain, of unknown length"),
        pytest.param(4_000, chat(max_tokens=4_000, stream=True, logprobs=True), id="with log-probabilities"),
        pytest.param(500, chat(max_tokens=500, n=128), id="many choices"),
    ],
)
async def test_a_long_reply_is_handled_in_turns(tmp_path: Path, renderer: TemplateRenderer, tokens: int, body: bytes):
    gateway = make_gateway(tmp_path, renderer, tokens=tokens)
    await gateway.ask("POST", CHAT, chat())
    assert await most_of(gateway, CHAT, body) < MOST
    await gateway.close()


async def test_many_messages_are_read_beside_the_loop(tmp_path: Path, renderer: TemplateRenderer):
    gateway = make_gateway(tmp_path, renderer)
    key = (await gateway.ask("POST", "/v1/sessions", b"{}")).json["api_key"]
    for edit in ("", "?"):  # the second call is compared with the first, message by message
        messages = [{"role": ("user", "assistant")[at % 2], "content": f"{at}"} for at in range(9000)]
        messages += [{"role": "user", "content": f"go on{edit}"}]
        turns, headers = Turns(), {"authorization": f"Bearer {key}"}
        body = chat(messages=messages)
        answer = await turns.during(lambda body=body, headers=headers: gateway.ask("POST", CHAT, body, headers))
        assert answer.status == 200
        assert turns.most < MOST
    await gateway.close()


async def test_many_events_are_recorded_in_turns(tmp_path: Path, renderer: TemplateRenderer):
    gateway = make_gateway(tmp_path, renderer)
    started = (await gateway.ask("POST", "/v1/sessions", b"{}")).json
    body = orjson.dumps({"events": [{"kind": "observation", "content": "x"}] * bounds.EVENTS})
    assert await most_of(gateway, f"/v1/sessions/{started['session']}/events", body) < MOST
    assert gateway.sessions.live[started["session"]].step == bounds.EVENTS + 1
    await gateway.close()


async def test_a_long_stream_of_an_upstream_is_read_in_turns(tmp_path: Path, renderer: TemplateRenderer):
    gateway = make_gateway(tmp_path, renderer, tokens=20_000, upstream=True)
    assert await most_of(gateway, CHAT, chat(stream=True)) < MOST
    await gateway.close()


async def test_what_is_large_is_read_in_another_thread(
    tmp_path: Path, renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
):
    gateway, here, seen = make_gateway(tmp_path, renderer), threading.current_thread(), list[bool]()

    def watched(read: Callable[..., Any]) -> Callable[..., Any]:
        def call(body: bytes, *more: Any) -> Any:
            if len(body) >= HEAVY:
                seen.append(threading.current_thread() is here)
            return read(body, *more)

        return call

    monkeypatch.setattr(shape, "check", watched(shape.check))
    monkeypatch.setattr(match_keys, "request_hash", watched(match_keys.request_hash))
    started = (await gateway.ask("POST", "/v1/sessions", orjson.dumps({"task": "x" * HEAVY}))).json
    place = f"/v1/sessions/{started['session']}"
    for path, body in (
        (CHAT, chat(messages=[{"role": "user", "content": "x" * HEAVY}])),
        (f"{place}/events", orjson.dumps({"events": [{"kind": "observation", "content": "x" * HEAVY}]})),
        (f"{place}/reward", orjson.dumps({"value": 1.0, "critique": "x" * HEAVY})),
        (f"{place}/end", orjson.dumps({"output": "x" * HEAVY})),
    ):
        assert (await gateway.ask("POST", path, body)).status == 200
    assert seen == [False] * 6
    await gateway.close()


async def test_a_report_beyond_its_bound_is_refused_with_the_bound(tmp_path: Path, renderer: TemplateRenderer):
    gateway = make_gateway(tmp_path, renderer)
    answer = await gateway.ask("POST", "/v1/sessions", orjson.dumps({"task": "x" * bounds.REPORT_BYTES}))
    assert answer.status == 413
    assert str(bounds.REPORT_BYTES) in answer.json["error"]["message"]
    await gateway.close()


@pytest.mark.parametrize("arguments", ["[" + "[]," * 200_000 + "1]", "[" * 100 + "]" * 100])
def test_arguments_that_are_too_much_to_look_into_stay_text(arguments: str):
    assert shape.unwieldy(arguments)
    assert match_keys.canonical_json(f" {arguments} ") == arguments.encode()


def test_a_sliced_chunk_is_the_same_chunk():
    from millrace.infra.engines.base import Chunk, LabelSpan, Usage

    for tops in ((), [((5, -1.0),)] * 1000):
        chunk = Chunk(
            0, list(range(1000)), [-0.5] * 1000, "stop", None, (LabelSpan("p@0", 0, 1000),), Usage(1, 2, 0), tops
        )
        first, *rest = slices(chunk)
        assert rest
        assert all(piece.finish_reason is None and piece.usage is None for piece in [first, *rest[:-1]])
        for piece in rest:
            first.extend(piece)
        assert first == chunk or (first.tops, list(first.tops)) == (first.tops, list(chunk.tops))
