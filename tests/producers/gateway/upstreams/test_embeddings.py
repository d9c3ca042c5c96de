"""Embeddings pass to an upstream and back, tried again and counted as calls are, and nothing of them is captured."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.dialects.rendering.template import TemplateRenderer
from millrace.infra.config import Settings
from millrace.infra.engines.upstream import TextUpstream
from millrace.producers.gateway.prices import Prices
from millrace.producers.gateway.sessions.ownership import hints
from millrace.producers.gateway.spending import KeyLimits
from millrace.producers.gateway.upstreams.embeddings import usage
from millrace.producers.gateway.upstreams.routes import RouteRule
from millrace.producers.gateway.upstreams.upstreams import Upstream, Upstreams, make
from tests.support.fake_http import FakeServer, Script, answer, hang_up, serving, stay_silent
from tests.support.gateway_world import ScriptedEngine, World, world

PATH, COUNT = "/v1/embeddings", "/v1/messages/count_tokens"
SAID = orjson.dumps(
    {
        "object": "list",
        "model": "far",
        "data": [{"object": "embedding", "index": 0, "embedding": [0.25, -1.5]}],
        "usage": {"prompt_tokens": 7, "total_tokens": 7},
    }
)
BODY = b'{ "model":"far", "input":["h\\u00e4",  [1,2]], "a_new_field":1.50}'
ASKED = {"authorization": "Bearer sk-mine"}


@asynccontextmanager
async def before(
    folder: Path, *scripts: Script, renderer: TemplateRenderer | None = None, retries: int = 0, **more: Any
) -> AsyncIterator[tuple[World, FakeServer, FakeServer]]:
    """A gateway before an upstream of these scripts, and one behind it that answers."""
    speaks = frozenset({"embeddings", "messages"})
    async with serving(*scripts) as far, serving(answer(SAID)) as spare:
        named = [
            Upstream("far", TextUpstream(f"{far.url}/v1", "sk-far"), speaks, retries, "deaf"),
            Upstream("deaf", TextUpstream(far.url), frozenset({"chat"}), 0, "spare"),
            Upstream("spare", TextUpstream(f"{spare.url}/v1"), speaks),
        ]
        rules = [
            RouteRule("far", "far", prices=Prices(1e6, 1e6, 1e6)),
            RouteRule("alias", "spare", "inner"),
            RouteRule("de*", "deaf"),
        ]
        upstreams = Upstreams(named, rules, answers_all=renderer is None, first_s=0.0)
        engine = ScriptedEngine(lambda *_: [1]) if renderer is not None else None
        own: dict[str, Any] = {"keys": {"sk-mine": "local"}, "key_names": {"sk-mine": "mine"}, **more}
        async with world(folder, renderer, engine, upstream=upstreams, **own) as w:
            try:
                yield w, far, spare
            finally:
                await upstreams.close()


async def test_a_client_gets_them_and_nothing_is_captured(tmp_path: Path) -> None:
    async with before(tmp_path, answer(SAID)) as (w, far, _):
        client = w.kept(openai.AsyncOpenAI(api_key="sk-mine", base_url=f"{w.url}/v1", max_retries=0))
        got = await client.embeddings.create(model="far", input="hi", encoding_format="float")
        assert got.data[0].embedding == [0.25, -1.5]
        assert got.usage.prompt_tokens == 7
        with pytest.raises(openai.NotFoundError, match="speaks another API than embeddings"):
            await client.embeddings.create(model="deaf", input="hi")
        await client.close()
        passed = await w.http.post(f"{PATH}?v=1", content=BODY, headers={**ASKED, "idempotency-key": "order-1"})
        assert (passed.status_code, passed.content) == (200, SAID)
        head, body = far.requests[-1]
        assert body == BODY
        assert head.startswith("POST /v1/embeddings?v=1 ")
        assert "Bearer sk-far" in head
        assert "sk-mine" not in head
        assert "order-1" not in head
        assert not w.events()
        assert not w.gateway.sessions.live


async def test_what_its_rule_calls_it_is_asked_for(tmp_path: Path) -> None:
    async with before(tmp_path, answer(SAID)) as (w, _, spare):
        got = await w.http.post(PATH, content=b'{"model":"alias","input":1.50}', headers=ASKED)
        assert got.status_code == 200
        assert spare.requests[0][1] == b'{"model":"inner","input":1.50}'


@pytest.mark.parametrize("path", [PATH, COUNT])
async def test_what_is_not_captured_is_tried_again_and_falls_back(tmp_path: Path, path: str) -> None:
    scripts = (answer(b"{}", 503), hang_up, answer(b"{}", 429))
    async with before(tmp_path, *scripts, retries=2) as (w, far, spare):
        got = await w.http.post(path, content=BODY, headers=ASKED)
        assert (got.status_code, got.content) == (200, SAID)
        assert [body for _, body in far.requests] == [BODY] * 3
        assert [body for _, body in spare.requests] == [BODY]


@pytest.mark.parametrize("path", [PATH, COUNT])
async def test_a_refusal_that_does_not_pass_comes_back_as_it_is(tmp_path: Path, path: str) -> None:
    async with before(tmp_path, answer(b'{"error": "no"}', 400), retries=2) as (w, far, spare):
        got = await w.http.post(path, content=BODY, headers=ASKED)
        assert (got.status_code, got.content) == (400, b'{"error": "no"}')
        assert (len(far.requests), len(spare.requests)) == (1, 0)
        assert w.gateway.recorder.spending.used("mine", 0).tokens == 0


@pytest.mark.parametrize(("said", "tokens"), [(SAID, 7), (b'{"usage": 7}', -(-len(BODY) // 4))])
async def test_they_count_for_the_key_and_end_with_its_budget(tmp_path: Path, said: bytes, tokens: int) -> None:
    limits = {"mine": KeyLimits(budget=1.0, budget_hours=1e6)}
    async with before(tmp_path, answer(said), limits=limits) as (w, far, _):
        assert (await w.http.post(PATH, content=BODY, headers=ASKED)).content == said
        assert w.gateway.recorder.spending.used("mine", 0) == (tokens, float(tokens))
        refused = await w.http.post(PATH, content=BODY, headers=ASKED)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "budget_spent")
        assert len(far.requests) == 1


async def test_who_leaves_has_spent_what_was_asked(tmp_path: Path) -> None:
    limits = {"mine": KeyLimits(budget=1e6, budget_hours=1e6)}
    async with before(tmp_path, stay_silent, limits=limits) as (w, far, _):
        call = asyncio.create_task(w.http.post(PATH, content=BODY, headers=ASKED))
        while not far.requests:
            await asyncio.sleep(0.01)
        call.cancel()
        while not w.gateway.recorder.spending.used("mine", 0).tokens:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("path", [PATH, COUNT])
@pytest.mark.parametrize("named", [False, True])
async def test_a_session_is_not_silent_while_its_embeddings_are_made(tmp_path: Path, path: str, named: bool) -> None:
    asked, told = asyncio.Event(), asyncio.Event()

    async def slowly(writer: asyncio.StreamWriter) -> None:
        asked.set()
        await told.wait()
        await answer(SAID)(writer)

    async with before(tmp_path, slowly) as (w, _, _):
        started = (await w.http.post("/v1/sessions", json={}, headers=ASKED)).json()
        session = w.gateway.sessions.live[started["session"]]
        own = {"authorization": f"Bearer {started['api_key']}"}
        if named:
            own = {**ASKED, "x-millrace-session": "mine"}
            session = w.gateway.sessions.make_session("local", hints(own), (), 1)
            w.gateway.sessions.add(session)
        call = asyncio.create_task(w.http.post(path, content=BODY, headers=own))
        await asked.wait()
        assert session.busy
        assert session not in w.gateway.sessions.idle(0)
        told.set()
        assert (await call).status_code == 200
        assert not session.busy


async def test_keys_are_those_of_calls(tmp_path: Path) -> None:
    async with before(tmp_path, answer(SAID)) as (w, far, _):
        assert (await w.http.post(PATH, content=BODY, headers={"authorization": "Bearer x"})).status_code == 401
        started = (await w.http.post("/v1/sessions", json={}, headers=ASKED)).json()
        own = {"authorization": f"Bearer {started['api_key']}"}
        assert (await w.http.post(PATH, content=BODY, headers=own)).status_code == 200
        await w.http.post(f"/v1/sessions/{started['session']}/end", json={}, headers=own)
        ended = await w.http.post(PATH, content=BODY, headers=own)
        assert ended.status_code == 403
        assert len(far.requests) == 1


@pytest.mark.parametrize("model", ["policy", "any"])
@pytest.mark.parametrize("routed", [False, True])
async def test_engines_make_none_and_say_so(
    tmp_path: Path, renderer: TemplateRenderer, model: str, routed: bool
) -> None:
    async def refused(w: World) -> None:
        got = await w.http.post(PATH, json={"model": model, "input": "hi"}, headers=ASKED)
        error = got.json()["error"]
        assert (got.status_code, error["type"], error["param"]) == (404, "invalid_request_error", "model")
        assert "engines of this gateway make no embeddings" in error["message"]

    if routed:
        async with before(tmp_path, answer(SAID), renderer=renderer) as (w, _, _):
            await refused(w)
    else:
        async with world(tmp_path, renderer, ScriptedEngine(lambda *_: [1])) as w:
            await refused(w)


def test_settings_may_name_them() -> None:
    far = {"url": "http://h/v1", "speaks": ["embeddings"]}
    given = {"upstreams": {"far": far}, "routes": [{"model": "*", "upstream": "far"}]}
    found = make(Settings.model_validate({"gateway": given}), {})
    assert found is not None
    assert found.route("p", "m", "embeddings") is not None


@given(
    st.binary(max_size=30) | st.sampled_from([b"[" * 100_000, b'{"usage":' + b"[" * 100_000, b'{"usage":{"x":"\xff"}}'])
)
def test_no_answer_is_an_error(said: bytes) -> None:
    assert usage(said) == (0, 0, 0)
