"""A stream whose next event takes long says so in comments, which nothing that is recorded holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response

from millrace.dialects.errors import ApiError
from millrace.dialects.rendering.template import TemplateRenderer
from millrace.producers.gateway.http.event_stream import COMMENT, EventStream
from tests.support.gateway_world import ScriptedEngine, world

OFTEN_S = 0.001
PATIENCE_S = 60.0
EVENTS = b"data: 1\n\n", b"data: 2\n\ndata: 3\n\n"


class Client:
    """What an application sends; whoever waits for `comments` goes on when so many came."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self._more = asyncio.Event()

    async def send(self, message: Any) -> None:
        await asyncio.sleep(0)  # others may try to send meanwhile
        self.sent.append(message)
        self._more.set()

    async def receive(self) -> Any:
        raise AssertionError("nothing is to be read")

    async def comments(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.bodies.count(COMMENT) < count:
                self._more.clear()
                await self._more.wait()

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.sent if message["type"] == "http.response.body"]

    async def get(self, events: AsyncGenerator[bytes, None], keep_alive_s: float) -> None:
        await EventStream(events, self.refused, keep_alive_s)({"type": "http"}, self.receive, self.send)

    @staticmethod
    def refused(error: BaseException) -> Response:
        return Response(str(error), 418)


async def test_comments_stand_between_events_while_the_next_one_takes_long():
    client = Client()

    async def events() -> AsyncGenerator[bytes, None]:
        for at, event in enumerate(EVENTS, 1):
            await client.comments(2 * at)
            yield event
        await client.comments(6)

    await client.get(events(), OFTEN_S)
    assert client.sent[0]["status"] == 200
    assert [message["type"] for message in client.sent].count("http.response.start") == 1
    assert [body for body in client.bodies if body != COMMENT] == [*EVENTS, b""]
    assert client.bodies[:2] == [COMMENT, COMMENT]
    assert [message["more_body"] for message in client.sent[1:]] == [True] * (len(client.sent) - 2) + [False]


@pytest.mark.parametrize("keep_alive_s", [0, 3600])
async def test_a_stream_that_does_not_wait_has_none(keep_alive_s: float):
    client = Client()

    async def events() -> AsyncGenerator[bytes, None]:
        for event in EVENTS:
            yield event

    await client.get(events(), keep_alive_s)
    assert client.bodies == [*EVENTS, b""]


@pytest.mark.parametrize("waited", [False, True])
async def test_an_error_before_the_first_event_has_its_status_until_a_comment_was_sent(waited: bool):
    client, error = Client(), ApiError(503, "no engine")

    async def events() -> AsyncGenerator[bytes, None]:
        if waited:
            await client.comments(1)
        raise error
        yield b""

    await client.get(events(), OFTEN_S if waited else 3600)
    starts = [message["status"] for message in client.sent if message["type"] == "http.response.start"]
    if waited:
        assert starts == [200]
        assert client.bodies[-2:] == [b"data: " + error.body() + b"\n\n", b""]
    else:
        assert starts == [418]
        assert client.bodies == [b"no engine"]


async def test_what_is_cut_off_in_the_middle_is_closed_and_sends_no_more():
    client, closed = Client(), asyncio.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            yield EVENTS[0]
            await asyncio.Event().wait()
        finally:
            closed.set()

    call = asyncio.create_task(client.get(events(), OFTEN_S))
    await client.comments(1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert closed.is_set()
    assert client.sent[-1]["more_body"]


async def test_comments_reach_the_client_and_nothing_else(tmp_path: Path, renderer: TemplateRenderer):
    engine = ScriptedEngine(lambda *_: renderer.tokenizer.encode("The answer is 42.<|im_end|>"))
    engine.gate = asyncio.Semaphore(0)
    async with world(tmp_path, renderer, engine, keep_alive_s=0.01) as w:
        body = {"model": "m", "messages": [{"role": "user", "content": "What is 3 + 4?"}], "stream": True}
        seen = list[str]()
        async with w.http.stream("POST", "/v1/chat/completions", json=body, timeout=PATIENCE_S) as answer:
            async for line in answer.aiter_lines():
                seen.append(line)
                if seen.count(COMMENT.decode().strip()) == 2 and engine.gate._value == 0:
                    for _ in range(100):
                        engine.gate.release()
        said = [line for line in seen if line and not line.startswith(":")]
        assert said[-1] == "data: [DONE]"
        assert "".join(said).count("content") > 1
        (call,) = w.calls()
        assert (call["trainable"], call["finish_reason"]) == (True, "stop")
        assert b"keep-alive" not in call["request"] + call["response"]
        assert b"The answer is 42." in call["response"]
