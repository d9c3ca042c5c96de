"""A proxy before a gateway that keeps what passes, and whether a record of the log says what passed.

Invariant: the comparison reads a streamed reply as calls to an upstream are read, by the reader of its API, and trusts
nothing else of the gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from millrace.dialects.all import MESSAGES, of_path, reader
from millrace.dialects.messages.request import parse_messages
from millrace.infra.process.net import LOCALHOST, free_ports

SKIPPED = {"host", "content-length", "transfer-encoding", "connection", "accept-encoding"}


@dataclass
class Exchange:
    """One request that passed the witness, and its answer."""

    method: str
    path: str
    status: int
    asked: bytes
    said: bytes
    streamed: bool


@dataclass
class Witness:
    """A proxy before the gateway that keeps what passes."""

    target: str
    seen: list[Exchange] = field(default_factory=list)
    """whole once `serving` is left"""

    async def pass_on(self, request: web.Request) -> web.StreamResponse:
        """Hand a request to the gateway, and its answer back as it comes."""
        body = await request.read()
        headers = {name: value for name, value in request.headers.items() if name.lower() not in SKIPPED}
        async with self._http.request(
            request.method, f"{self.target}{request.raw_path}", data=body, headers=headers
        ) as answer:
            kind = answer.headers.get("content-type", "")
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in SKIPPED}
            out = web.StreamResponse(status=answer.status, headers=kept)
            await out.prepare(request)
            said = b""
            async for part in answer.content.iter_any():
                said += part
                await out.write(part)
            streamed = "event-stream" in kind
            self.seen.append(Exchange(request.method, request.path, answer.status, body, said, streamed))
            return out

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Its URL."""
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", self.pass_on)
        runner = web.AppRunner(app)
        await runner.setup()
        (port,) = free_ports(1)
        await web.TCPSite(runner, LOCALHOST, port).start()
        async with aiohttp.ClientSession(auto_decompress=False) as self._http:
            try:
                yield f"http://{LOCALHOST}:{port}"
            finally:
                await runner.cleanup()


def says(response: bytes, one: Exchange) -> bool:
    """Whether the response of a record of one choice is what came back: a plain reply byte for byte; a streamed one by
    its id, message, reason to end and, where it told them, counts. The record of a message also has the thoughts that
    its client did not ask for: without them it is compared as JSON."""
    hidden = of_path(one.path) is MESSAGES and not parse_messages(one.asked).shows_thinking
    if not one.streamed:
        return one.said == response or (hidden and _without_thoughts(response) == _parsed(one.said))
    read = reader(of_path(one.path))
    events = read.assembler()
    events.feed(one.said)
    told = events.response()
    came = read.answer(orjson.dumps(told), b"")
    kept = read.answer(orjson.dumps(_without_thoughts(response)) if hidden else response, b"")
    if events.unread or not events.closing or came is None or kept is None:
        return False
    counts = "usage" not in told or came.answer.usage == kept.answer.usage
    return counts and (came.answer.id, came.answer.choices) == (kept.answer.id, kept.answer.choices)


def _without_thoughts(message: bytes) -> dict[str, Any]:
    found = orjson.loads(message)
    return {**found, "content": [block for block in found["content"] if block["type"] != "thinking"]}


def _parsed(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
