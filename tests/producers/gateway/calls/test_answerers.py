"""The laws of the seam of calls (`producers/gateway/calls/call.py`), for each who answers: nothing is told before it is
recorded or marked, a client that leaves and a reply that breaks off are recorded as aborted, and what fails before an
answer leaves no trace."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from millrace.dialects.all import CHAT
from millrace.dialects.errors import ApiError
from millrace.dialects.rendering.template import TemplateRenderer
from millrace.infra.engines.base import Sampling
from millrace.infra.engines.upstream import TextUpstream
from millrace.infra.errors import EngineUnavailable
from millrace.producers.gateway.calls.call import Call
from millrace.producers.gateway.calls.engine_calls import EngineCalls
from millrace.producers.gateway.calls.pipeline import CallPipeline
from millrace.producers.gateway.upstreams.upstream_routes import UpstreamRoutes
from millrace.producers.gateway.upstreams.upstreams import Upstreams
from tests.support.fake_http import FakeServer, answer, hang_up, serving, stream
from tests.support.gateway_world import ScriptedEngine, World, world

Open = Callable[[Path, TemplateRenderer, str], Any]


@dataclass
class Answerer:
    """A gateway before one who answers in some manner: soundly, never, or not to the end."""

    w: World
    make: Callable[[bool], Any]

    @property
    def pipeline(self) -> CallPipeline:
        return CallPipeline(self.w.gateway)

    async def call(self, *, streamed: bool) -> Call:
        call: Call = await self.make(streamed)
        return call

    async def streamed(self, call: Call) -> bytes:
        """A whole stream."""
        assert await self.pipeline.open(call) is None
        return b"".join([piece async for piece in self.pipeline.stream(call)])

    def records(self) -> list[str]:
        return [event["kind"] for event in self.w.events()]


def body(*, streamed: bool) -> bytes:
    said = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": streamed}
    return json.dumps(said).encode()


@asynccontextmanager
async def engine(folder: Path, renderer: TemplateRenderer, manner: str) -> AsyncIterator[Answerer]:
    def script(prompt: list[int], sampling: Sampling, choice: int) -> list[int]:
        return renderer.tokenizer.encode("Some words, and more of them.<|im_end|>")

    one = ScriptedEngine(script)
    if manner == "never":
        one.error = EngineUnavailable("gone")
    elif manner == "broken":
        one.error, one.break_after = EngineUnavailable("gone"), 5
    elif manner == "hanging":
        one.gate = asyncio.Semaphore(5)
    async with world(folder, renderer, one) as w:
        calls = EngineCalls(w.gateway)
        caller = w.gateway.callers.identify({})
        yield Answerer(w, lambda streamed: calls.prepare(caller, {}, body(streamed=streamed)))


@asynccontextmanager
async def upstream(folder: Path, renderer: TemplateRenderer, manner: str) -> AsyncIterator[Answerer]:
    async with serving(hang_up) as server:
        upstreams = Upstreams.one(TextUpstream(f"{server.url}/v1"))
        async with world(folder, None, None, upstream=upstreams) as w:
            door, caller = UpstreamRoutes(w.gateway, upstreams), w.gateway.callers.identify({})

            async def make(streamed: bool) -> Call:
                _play(server, manner, streamed=streamed)
                routed = await door.route_request(CHAT, body(streamed=streamed))
                assert routed is not None
                return await door.prepare(caller, {}, body(streamed=streamed), routed, "")

            yield Answerer(w, make)


def _play(server: FakeServer, manner: str, *, streamed: bool) -> None:
    delta = {"id": "c", "choices": [{"index": 0, "delta": {"role": "assistant", "content": "words"}}]}
    last = {"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    events = [f"data: {json.dumps(event)}\n\n".encode() for event in (delta, delta, last)] + [b"data: [DONE]\n\n"]
    message = {"role": "assistant", "content": "words"}
    reply = {"id": "c", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
    whole = json.dumps(reply).encode()
    server.scripts[:] = {
        "sound": [stream(*events) if streamed else answer(whole)],
        "never": [hang_up],
        "broken": [stream(*events[:2], then="cut")],
        "hanging": [stream(*events[:2], then="hang")],
    }[manner]


ANSWERERS: dict[str, Open] = {"engine": engine, "upstream": upstream}
each = pytest.mark.parametrize("name", sorted(ANSWERERS))


@each
async def test_a_whole_reply_is_recorded_before_it_is_told(tmp_path: Path, renderer: TemplateRenderer, name: str):
    async with ANSWERERS[name](tmp_path, renderer, "sound") as one:
        call = await one.call(streamed=False)
        assert one.records() == []
        reply = await one.pipeline.answer(call)
        assert one.records() == ["episode_started", "model_call"]
        (record,) = one.w.calls()
        assert record["response"] == reply.body
        assert not call.session.busy


@each
async def test_a_stream_is_marked_before_its_first_bytes_and_recorded_before_its_last(
    tmp_path: Path, renderer: TemplateRenderer, name: str
):
    async with ANSWERERS[name](tmp_path, renderer, "sound") as one:
        call = await one.call(streamed=True)
        assert await one.pipeline.open(call) is None
        pieces, seen = b"", []
        async for piece in one.pipeline.stream(call):
            pieces += piece
            seen.append((one.records(), bool(one.w.gateway.recorder.underway.note(call.name))))
        *begun, end = seen
        assert all(kinds == ["episode_started"] and is_marked for kinds, is_marked in begun)
        assert end == (["episode_started", "model_call"], False)
        assert b"[DONE]" in pieces
        assert not call.session.busy


@each
@pytest.mark.parametrize("streamed", [False, True])
async def test_what_fails_before_an_answer_leaves_no_trace(
    tmp_path: Path, renderer: TemplateRenderer, name: str, streamed: bool
):
    async with ANSWERERS[name](tmp_path, renderer, "never") as one:
        call = await one.call(streamed=streamed)
        with pytest.raises(ApiError):
            await (one.streamed(call) if streamed else one.pipeline.answer(call))
        assert one.records() == []
        assert not one.w.gateway.sessions.live


@each
async def test_a_stream_that_breaks_off_says_so_and_is_recorded_as_aborted(
    tmp_path: Path, renderer: TemplateRenderer, name: str
):
    async with ANSWERERS[name](tmp_path, renderer, "broken") as one:
        call = await one.call(streamed=True)
        assert b'"error"' in await one.streamed(call)
        assert [record["finish_reason"] for record in one.w.calls()] == ["abort"]


@each
@pytest.mark.parametrize("how", ["closed", "cancelled"])
async def test_a_client_that_leaves_ends_its_call_which_is_recorded_as_aborted(
    tmp_path: Path, renderer: TemplateRenderer, name: str, how: str
):
    async with ANSWERERS[name](tmp_path, renderer, "hanging") as one:
        call = await one.call(streamed=True)
        assert await one.pipeline.open(call) is None
        told: AsyncGenerator[bytes, None] = one.pipeline.stream(call)
        assert await anext(told)
        if how == "closed":
            await told.aclose()
        else:
            rest = asyncio.create_task(_drain(told))
            await asyncio.sleep(0.05)
            rest.cancel()
            await asyncio.gather(rest, return_exceptions=True)
        assert [record["finish_reason"] for record in one.w.calls()] == ["abort"]
        assert not one.w.gateway.recorder.underway.note(call.name)
        assert not call.session.busy


async def _drain(pieces: AsyncGenerator[bytes, None]) -> None:
    async for _ in pieces:
        pass
