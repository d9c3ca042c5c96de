"""Whatever an upstream answers, its client has it or an error of its API, and the log a record or a gap."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import orjson
import pytest

from millrace.dialects.all import DIALECTS, by_name
from millrace.infra.engines.upstream import Longest, TextUpstream
from millrace.producers.gateway.upstreams.routes import RouteRule
from millrace.producers.gateway.upstreams.upstreams import Upstream, Upstreams
from tests.support import logged
from tests.support import upstream_answers as answers
from tests.support.engines import until
from tests.support.fake_http import FakeServer, Script, serving
from tests.support.gateway_world import World, world
from tests.support.upstream_answers import READERS

PATHS = {dialect.name: dialect.path for dialect in DIALECTS}
STATUSES = (200, 200, 200, 200, 201, 206, 299, 204, 301, 304, 400, 404, 429, 500, 529, 999, 101)
EMPTY = (204, 304)
CASES = 40
LONGEST = 100_000
each = pytest.mark.parametrize("api", sorted(READERS))
both = pytest.mark.parametrize("streamed", [False, True], ids=["plain", "stream"])


@asynccontextmanager
async def before(folder: Path, *scripts: Script) -> AsyncIterator[tuple[World, FakeServer]]:
    """A gateway before one upstream, whose answers have low bounds."""
    async with serving(*scripts) as far:
        upstream = TextUpstream(far.url, "sk-far", longest=Longest(LONGEST, LONGEST))
        upstreams = Upstreams(
            [Upstream("far", upstream, frozenset(READERS))], [RouteRule("*", "far")], answers_all=True
        )
        async with world(folder, None, None, upstream=upstreams) as w:
            try:
                yield w, far
            finally:
                await upstreams.close()


def asking(api: str, *, streamed: bool) -> bytes:
    return orjson.dumps({**orjson.loads(answers.REQUEST[api]), "stream": streamed})


@dataclass
class Answer:
    """What an upstream says. `sound`: all of it arrives as its head promises, and is not too long."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes
    sound: bool
    sent: bytes

    async def __call__(self, writer: asyncio.StreamWriter) -> None:
        writer.write(self.sent)
        await writer.drain()
        writer.close()


def said(r: Random, api: str, *, streamed: bool) -> Answer:
    """Any answer."""
    status = r.choice(STATUSES)
    body = answers.stream(r, api) if streamed and r.random() < 0.9 else answers.whole(r, api)
    body = b"" if status in EMPTY else body * r.choice((1, 1, 1, 1, 0, 3))
    names = (b"content-type", b"x-request-id", b"retry-after", b"openai-x", b"anthropic-y", b"x-ratelimit-z")
    chosen = r.sample(names, r.randrange(len(names)))
    values = (b"x", b"7", "Bäckerei".encode(), b"\xff\xe4", "\u65e5".encode(), b"a\tb", b"\x80", b"1, 2", b"x" * 4000)
    headers = {name: r.choice(values) for name in chosen}
    extra, payload = b"", body
    if body and r.random() < 0.2:
        extra, payload = b"content-encoding: gzip\r\n", gzip.compress(body, 1)
    sound, kind = True, r.random()
    if status in EMPTY or status == 101:
        extra = b""
    elif kind < 0.4:
        extra += b"content-length: %d\r\n" % len(payload)
    elif kind < 0.7:
        extra += b"transfer-encoding: chunked\r\n"
        cuts = [payload[at : at + 500] for at in range(0, len(payload), 500)]
        payload = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in cuts) + b"0\r\n\r\n"
    if kind < 0.7 and payload and extra and r.random() < 0.2:
        payload, sound = payload[: r.randrange(len(payload))], False
    head = b"".join(b"%s: %s\r\n" % each for each in headers.items())
    sent = b"HTTP/1.1 %d X\r\nconnection: close\r\n%s%s\r\n%s" % (status, head, extra, payload)
    passes = streamed and 200 <= status < 300
    return Answer(status, headers, body, sound and (passes or len(body) <= LONGEST), sent)


def error_of(api: str, text: bytes, *, streamed: bool = False) -> bool:
    """Whether a client of this API reads an error there."""
    found = orjson.loads(text)
    marked = found.get("type") == "error"
    return isinstance(found["error"], dict) and marked == (api == "messages" or (streamed and api == "responses"))


@each
@both
async def test_any_answer(tmp_path: Path, api: str, streamed: bool, caplog: pytest.LogCaptureFixture) -> None:
    body = asking(api, streamed=streamed)
    async with before(tmp_path) as (w, far):
        for seed in range(CASES):
            told = said(Random(f"{api} {streamed} {seed}"), api, streamed=streamed)
            far.scripts[:] = [told]
            end = w.log.end
            headers = {"x-millrace-session": f"s{seed}"}
            got = await w.http.post(PATHS[api], content=body, headers=headers)
            if streamed and told.sound and told.status < 300:  # a reply in one piece of JSON comes as a stream
                told.body = b"".join([part async for part in by_name(api).as_stream(once(told.body))])
            holds(api, told, got.status_code, got.content, streamed=streamed)
            if told.sound and told.status >= 200:
                assert passed(dict(got.headers.raw), told.headers), seed
            recorded(api, told, got.status_code, w.events()[end:], streamed=streamed)
            await until(lambda: not any(session.busy for session in w.gateway.sessions.live.values()))
        live = {id: session.newest_text for id, session in w.gateway.sessions.live.items()}
        assert live
    assert not [line for line in logged.records(caplog) if line.levelname == "ERROR"]
    async with before(tmp_path) as (w, _):
        again = w.gateway.sessions
        assert ({id: session.newest_text for id, session in again.live.items()}, again.unreadable) == (live, set())


async def once(part: bytes) -> AsyncIterator[bytes]:
    yield part


def holds(api: str, told: Answer, status: int, got: bytes, *, streamed: bool) -> None:
    """The client has what the upstream said, or an error of its API."""
    if told.status < 200:
        assert status == 502
    elif told.sound:
        assert (status, got) == (told.status, told.body)
    elif status != told.status or not streamed:
        assert status in (502, 429)
    if status != told.status:
        assert error_of(api, got)
    elif not told.sound and streamed and status < 300 and got != told.body:
        begun, _, error = got.rpartition(b"data: ")
        assert told.body.startswith(begun.removesuffix(b"event: error\n"))
        assert error_of(api, error, streamed=True)


def passed(raw: Mapping[bytes, bytes], told: Mapping[bytes, bytes]) -> bool:
    """Whether those headers of an answer came that are worth it, byte for byte."""
    return all(raw.get(name) == value for name, value in told.items())


def recorded(api: str, told: Answer, status: int, events: list[dict[str, Any]], *, streamed: bool) -> None:
    """A success leaves a record or a gap for each choice; one that was too long to pass on a gap, since it was paid
    for; anything else nothing."""
    if not 200 <= status < 300:
        paid = 200 <= told.status < 300
        assert [event["kind"] for event in events] in ([], ["episode_started", "gap"] if paid else [])
        return
    begun, *rest = events
    kinds = [event["kind"] for event in rest]
    assert begun["kind"] == "episode_started"
    assert rest
    assert set(kinds) <= {"model_call", "gap"}
    numbers = [event["data"]["choice"] for event in rest if event["kind"] == "model_call"]
    assert len(set(numbers)) == len(numbers)
    if not streamed:
        found = READERS[api].answer(told.body, b"")
        choices = found.answer.choices if found is not None else []
        assert kinds == (["model_call"] * len(choices) or ["gap"])
        assert all(event["data"]["response"] == told.body for event in rest if event["kind"] == "model_call")
    else:
        assert kinds in (["model_call"] * len(numbers) + ["gap"] * count for count in (0, 1))
