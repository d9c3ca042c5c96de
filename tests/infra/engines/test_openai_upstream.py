"""The text-only upstream: everything passes through unchanged."""

from __future__ import annotations

import pytest

from millrace.infra.engines.upstream import TextUpstream
from millrace.infra.errors import EngineTimeout, EngineUnavailable
from tests.support.fake_http import answer, hang_up, serving, stay_silent, stream

BODY = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'


async def test_bodies_and_statuses_pass_and_our_key_is_used() -> None:
    async with serving(answer(b'{"id":"1"}'), answer(b'{"error":{}}', 429)) as fake:
        upstream = TextUpstream(f"{fake.url}/v1", "ours")
        good, refused = await upstream.chat(BODY), await upstream.chat(BODY)
        await upstream.close()
    assert (good.status, good.body, good.headers["content-type"]) == (200, b'{"id":"1"}', "application/json")
    assert (refused.status, refused.body) == (429, b'{"error":{}}')
    head, body = fake.requests[0]
    assert head.startswith("POST /v1/chat/completions ")
    assert "Bearer ours" in head
    assert body == BODY


async def test_a_stream_passes_as_it_comes() -> None:
    parts = [b'data: {"a":1}\n\n', b"data: [DONE]\n\n"]
    async with serving(stream(*parts)) as fake:
        upstream = TextUpstream(fake.url)
        async with await upstream.stream_chat(BODY) as reply:
            assert reply.status == 200
            assert b"".join([data async for data in reply.chunks()]) == b"".join(parts)
        await upstream.close()


@pytest.mark.parametrize(("then", "kind"), [("cut", EngineUnavailable), ("hang", EngineTimeout)])
async def test_a_stream_that_breaks_off(then: str, kind: type[Exception]) -> None:
    async with serving(stream(b"data: 1\n\n", then=then)) as fake:
        upstream = TextUpstream(fake.url, idle_s=0.3)
        async with await upstream.stream_chat(BODY) as reply:
            with pytest.raises(kind):
                assert [data async for data in reply.chunks()]
        await upstream.close()


async def test_no_answer_is_never_asked_for_twice() -> None:
    async with serving(hang_up) as fake:
        upstream = TextUpstream(fake.url)
        with pytest.raises(EngineUnavailable):
            await upstream.chat(BODY)
        assert len(fake.requests) == 1
        assert not await upstream.health()
        await upstream.close()
    async with serving(stay_silent) as fake:
        upstream = TextUpstream(fake.url, idle_s=0.2)
        with pytest.raises(EngineTimeout):
            await upstream.chat(BODY)
        await upstream.close()


async def test_models() -> None:
    async with serving(answer(b'{"data":[]}')) as fake:
        upstream = TextUpstream(fake.url)
        assert (await upstream.models()).body == b'{"data":[]}'
        assert await upstream.health()
        await upstream.close()
    assert fake.requests[0][0].startswith("GET /models ")
