"""What goes between callers and an upstream that all of them share: each caller is apart, and nothing is lost on the
way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.infra.engines.upstream import StreamedReply, TextUpstream
from millrace.producers.gateway.sessions.reply_index import ChoiceReply
from millrace.producers.gateway.upstreams.routes import RouteRule
from millrace.producers.gateway.upstreams.upstream_call import UpstreamCall
from millrace.producers.gateway.upstreams.upstream_routes import forwarded_headers
from millrace.producers.gateway.upstreams.upstreams import Upstream, Upstreams
from tests.support.fake_http import FakeServer, Script, answer, serving, stream
from tests.support.gateway_world import World, world

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
names = st.text("ab1 ", max_size=3)


@asynccontextmanager
async def before(
    folder: Path, *scripts: Script, client: type[TextUpstream] = TextUpstream, send_as: str = "", **more: Any
) -> AsyncIterator[tuple[World, FakeServer]]:
    async with serving(*scripts) as far:
        upstream = Upstream("far", client(far.url, "sk-far"), frozenset({"chat", "messages"}))
        upstreams = Upstreams([upstream], [RouteRule("*", "far", send_as)], answers_all=True)
        async with world(folder, None, None, upstream=upstreams, **more) as w:
            try:
                yield w, far
            finally:
                await upstreams.close()


async def test_an_episode_may_name_the_policy_of_a_gateway_without_engines(tmp_path: Path) -> None:
    async with before(tmp_path, answer(b"{}")) as (w, _):
        session = await w.start(policy="policy")
        assert w.events(session["session"])[0]["policy"] == "policy"
        got = await w.http.post("/v1/sessions", json={"policy": "small"})
        assert got.status_code == 404
        error = got.json()["error"]
        assert error["message"] == "No policy 'small' is served here; served are policy"
        assert (error["code"], error["param"]) == ("policy_not_found", "policy")


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_upstream_s_answer_says_which_session_it_is_in(tmp_path: Path, streamed: bool) -> None:
    events = b'data: {"id": "c", "choices": [{"index": 0, "delta": {"content": "Hi"}}]}\n\ndata: [DONE]\n\n'
    whole = b'{"id": "c", "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi"}}]}'
    async with before(tmp_path, stream(events) if streamed else answer(whole)) as (w, _):
        got = await w.http.post(CHAT, json={"model": "far", "messages": [USER], "stream": streamed})
        assert got.status_code == 200
        assert {event["trajectory"] for event in w.events()} == {got.headers["x-millrace-trajectory"]}


@given(*[st.tuples(names, names, names)] * 2)
def test_a_key_for_one_call_is_one_callers_own(one: tuple[str, str, str], other: tuple[str, str, str]) -> None:
    def sent(tenant: str, subject: str, key: str) -> str:
        return forwarded_headers({"idempotency-key": key}, tenant, subject)["idempotency-key"]

    assert (sent(*one) == sent(*other)) == (one == other)
    assert forwarded_headers({"authorization": "x", "anthropic-beta": "b"}, "", "") == {"anthropic-beta": "b"}


async def test_callers_share_no_key_for_one_call_and_no_cookie(tmp_path: Path) -> None:
    async with before(tmp_path, answer(b"{}"), keys={"ka": "a", "kb": "b"}) as (w, far):
        for key, user in (("ka", ""), ("kb", ""), ("ka", "ann"), ("ka", "")):
            for path in (CHAT, "/v1/messages/count_tokens"):
                headers = {"authorization": f"Bearer {key}", "idempotency-key": "order-1", "cookie": "sid=1"}
                headers |= {"x-millrace-user": user} if user else {}
                got = await w.http.post(path, json={"model": "far", "messages": [USER]}, headers=headers)
                assert got.status_code == 200
        heads = [head.lower() for head, _ in far.requests]
        assert not any("cookie" in head for head in heads)
        sent = [line for head in heads for line in head.split("\r\n") if line.startswith("idempotency-key")]
        assert len(sent) == len(heads)
        assert not any("order-1" in line for line in sent)
        assert sent[::2] == sent[1::2], "the same caller's, whatever is asked"
        first, second, third, fourth = sent[::2]
        assert len({first, second, third}) == 3
        assert first == fourth, "a retry stays one"


@pytest.mark.parametrize(("odd", "status"), [(b'"\xff":1,', 400), (b'"x":"\xff",', 200), (b'"a":1 "b":2,', 400)])
async def test_a_request_that_is_no_text_is_refused_where_its_model_is_renamed(
    tmp_path: Path, odd: bytes, status: int
) -> None:
    body = b'{"model":"far",' + odd + b'"messages":[{"role":"user","content":"hi"}]}'
    async with before(tmp_path, answer(b"{}"), send_as="near") as (w, _):
        for path in (CHAT, "/v1/messages/count_tokens"):
            assert (await w.http.post(path, content=body)).status_code == status


class Odd(TextUpstream):
    """Gives headers that no server takes."""

    answers: list[StreamedReply]

    async def stream(self, path: str, body: bytes, headers: Mapping[str, str] = {}) -> StreamedReply:
        found = await super().stream(path, body, headers)
        found.headers = {"x-request-id": "\u65e5"}
        Odd.answers.append(found)
        return found


async def test_a_stream_that_nobody_reads_is_closed_and_recorded(tmp_path: Path) -> None:
    Odd.answers = []
    async with before(tmp_path, stream(b"data: 1\n\n", then="hang"), client=Odd) as (w, _):
        got = await w.http.post(CHAT, json={"model": "far", "messages": [USER], "stream": True})
        assert got.status_code == 500
        assert [event["kind"] for event in w.events()] == ["episode_started", "model_call"]
        assert w.calls()[0]["finish_reason"] == "abort"
        (session,) = w.gateway.sessions.live.values()
        assert not session.busy
        (left,) = Odd.answers
        with pytest.raises(Exception, match="closed"):
            await anext(left.chunks())


def choices(*texts: str) -> bytes:
    said = [{"index": 0, "message": {"role": "assistant", "content": text}} for text in texts]
    return orjson.dumps({"id": "c1", "choices": said})


async def test_a_choice_that_cannot_be_captured_leaves_its_own_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = UpstreamCall.record

    def failing(*args: Any) -> Any:
        if any(isinstance(given, ChoiceReply) and given.choice == 1 for given in args):
            raise RecursionError
        return made(*args)

    monkeypatch.setattr(UpstreamCall, "record", failing)
    raw = choices("A", "B", "C")
    async with before(tmp_path, answer(raw)) as (w, _):
        got = await w.http.post(CHAT, json={"model": "far", "messages": [USER]})
        assert (got.status_code, got.content) == (200, raw)
        assert [event["kind"] for event in w.events()] == ["episode_started", "model_call", "gap", "model_call"]
        assert [call["choice"] for call in w.calls()] == [0, 2]


async def test_choices_of_one_number_are_known_alike_after_a_start(tmp_path: Path) -> None:
    raw = choices("A", "B")
    async with before(tmp_path, answer(raw)) as (w, _):
        assert (await w.http.post(CHAT, json={"model": "far", "messages": [USER]})).content == raw
        assert [call["choice"] for call in w.calls()] == [0, 1]
    async with before(tmp_path, answer(raw)) as (w, _):
        (session,) = w.gateway.sessions.live.values()
        assert session.newest_text == "B"
        for text in ("A", "B"):
            talk = [USER, {"role": "assistant", "content": text}, USER]
            await w.http.post(CHAT, json={"model": "far", "messages": talk})
        assert {event["trajectory"] for event in w.events()} == {session.id}


async def test_calls_at_once_have_each_its_own(tmp_path: Path) -> None:
    async with before(tmp_path, *(answer(choices(str(at))) for at in range(8))) as (w, _):
        calls = [w.http.post(CHAT, json={"model": "far", "messages": [USER]}) for _ in range(8)]
        got = await asyncio.gather(*calls)
        assert sorted(answer_.content for answer_ in got) == sorted(call["response"] for call in w.calls())
