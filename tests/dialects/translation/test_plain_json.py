"""A server that answers a request for a stream with JSON: its client has the stream that says the same, in its own API,
and the log the reply."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.dialects import shape
from millrace.dialects.all import DIALECTS, read, reader
from millrace.dialects.base import Dialect
from millrace.dialects.reading.events import LARGEST
from millrace.dialects.reading.reader import ReadAnswer
from millrace.dialects.translation.all import TRANSLATORS
from millrace.infra.engines.upstream import TextUpstream
from millrace.infra.errors import EngineUnavailable
from millrace.producers.gateway.upstreams.routes import RouteRule
from millrace.producers.gateway.upstreams.upstreams import Upstream, Upstreams
from tests.support import upstream_answers as answers
from tests.support.fake_http import answer, serving
from tests.support.gateway_world import world
from tests.support.speakers import SPEAKERS, Said

NAMES = [one.name for one in TRANSLATORS]
CLIENTS = {kind.name: kind for kind in SPEAKERS}
PAIRS = [(client, server) for client in NAMES for server in NAMES] + [("completions", "completions")]
pairs = pytest.mark.parametrize(("client", "server"), PAIRS)
each = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda one: one.name)


async def parts(*given: bytes, error: Exception | None = None) -> AsyncIterator[bytes]:
    for part in given:
        yield part
    if error is not None:
        raise error


async def streamed(dialect: Dialect, *given: bytes) -> bytes:
    return b"".join([part async for part in dialect.as_stream(parts(*given))])


def told(said: Said) -> Any:
    return said.id, said.text, said.thoughts, [call[1:] for call in said.calls], said.end, said.tokens


def whole(server: str, **more: Any) -> bytes:
    """A reply of one choice."""
    said = answers.WHOLE[server]
    return orjson.dumps({**said, **({"choices": said["choices"][:1]} if "choices" in said else {}), **more})


@pairs
async def test_its_client_reads_the_same_reply(tmp_path: Path, client: str, server: str) -> None:
    async with serving(answer(whole(server))) as far:
        upstreams = Upstreams([Upstream("far", TextUpstream(far.url), frozenset({server}))], [RouteRule("m", "far")])
        async with world(tmp_path, None, None, upstream=upstreams) as w:
            speaker = CLIENTS[client](w)
            plain, stream = [await speaker.say(["hi"], stream=streams) for streams in (False, True)]
            assert told(plain) == told(stream)
            calls = [(call["finish_reason"], call["usage"], reply_of(call)) for call in w.calls()]
            assert calls == calls[:1] * 2
            got = await w.http.post(speaker.path, json={**speaker.body("hi"), "stream": True})
            assert got.headers["content-type"] == "text/event-stream"


def reply_of(call: Any) -> Any:
    """What a recorded call was told; calls of tools without the ids that translations mint."""
    return read(call["request"], call["response"]).replies[0]


@pairs
@pytest.mark.parametrize("error", [{"message": "no credit"}, "no credit"], ids=["object", "text"])
async def test_its_client_reads_the_error(tmp_path: Path, client: str, server: str, error: Any) -> None:
    async with serving(answer(orjson.dumps({"error": error}))) as far:
        upstreams = Upstreams([Upstream("far", TextUpstream(far.url), frozenset({server}))], [RouteRule("m", "far")])
        async with world(tmp_path, None, None, upstream=upstreams) as w:
            speaker = CLIENTS[client](w)
            with pytest.raises(speaker.failed, match="no credit"):
                await speaker.say(["hi"], stream=True)
            assert len(w.events()) == 2


# ---------------------------------------------------------------------- the laws of it


@each
@given(seed=st.integers(0), cuts=st.lists(st.integers(0, 2000), max_size=4))
def test_a_reply_is_the_same_wherever_it_is_cut(dialect: Dialect, seed: int, cuts: list[int]) -> None:
    body = answers.whole(Random(seed), dialect.name)
    places = sorted({min(cut, len(body)) for cut in cuts} | {0, len(body)})
    got = asyncio.run(streamed(dialect, *(body[at:to] for at, to in pairwise(places))))
    reading = reader(dialect)
    if got == body:
        assert not dialect.events_of(shape.object_in(body) or {})
        return
    events = reading.assembler()
    events.feed(got)
    texts = [texts_of(read) for read in (reading.whole(events, b"")[1], reading.answer(body, b""))]
    assert events.unread or texts[0] == texts[1]  # an event is deeper than a reply; of very many blocks some are read


def texts_of(read: ReadAnswer | None) -> list[Any]:
    return [] if read is None else sorted((said.choice, said.message["content"]) for said in read.answer.choices)


@each
@given(given=st.lists(st.binary(max_size=30), max_size=5))
def test_anything_else_stays_as_it_is(dialect: Dialect, given: list[bytes]) -> None:
    for odd in (given, [b"data: {", *given], [b" ", b"{", *given], [b"{" + b" " * LARGEST, *given]):
        assert asyncio.run(streamed(dialect, *odd)) == b"".join(odd)


@each
async def test_what_breaks_off_has_said_what_came(dialect: Dialect) -> None:
    body = whole(dialect.name)
    stream = dialect.as_stream(parts(body[:9], body[9:], error=EngineUnavailable("gone")))
    assert await anext(stream) == body
    with pytest.raises(EngineUnavailable, match="gone"):
        await anext(stream)
