"""One gateway before its own engine and upstreams: the model chooses, every API passes byte for byte both ways, and the
log reads what went by as the upstream meant it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.dialects.all import DIALECTS, read
from millrace.dialects.rendering.template import TemplateRenderer
from millrace.infra.engines.base import Sampling
from millrace.infra.engines.upstream import UNTRAINABLE, TextUpstream
from millrace.producers.gateway.prices import Prices
from millrace.producers.gateway.upstreams.routes import RouteRule
from millrace.producers.gateway.upstreams.upstreams import Upstream, Upstreams
from millrace.schemas import bounds
from tests.support.fake_http import FakeServer, Script, answer, hang_up, serving, stream
from tests.support.gateway_world import ScriptedEngine, World, world
from tests.support.speakers import SPEAKERS, Results, Speaker
from tests.support.upstream_answers import READERS

REPLY = (
    "<think>\nwhich tool?\n</think>\n\nBoth.\n"
    '<tool_call>\n{"name": "add", "arguments": {"a": 1.0, "b": "Zürich"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "lookup", "arguments": {}}\n</tool_call>'
)
ALL = frozenset(dialect.name for dialect in DIALECTS)
PATHS = {dialect.name: dialect.path for dialect in DIALECTS}
each = pytest.mark.parametrize("dialect", sorted(ALL))
both = pytest.mark.parametrize("streamed", [False, True], ids=["plain", "stream"])


def engine_of(renderer: TemplateRenderer, said: str = REPLY) -> ScriptedEngine:
    def script(prompt: list[int], sampling: Sampling, choice: int) -> Sequence[int]:
        return renderer.tokenizer.encode(said + "<|im_end|>")

    return ScriptedEngine(script)


@asynccontextmanager
async def before(
    folder: Path, renderer: TemplateRenderer | None, urls: dict[str, str], rules: Sequence[RouteRule], **more: Any
) -> AsyncIterator[World]:
    """A gateway with an engine of its own before upstreams, each with the next as its fallback where `more` says so."""
    fallbacks, retries = more.pop("fallbacks", {}), more.pop("retries", 0)
    upstreams = [
        Upstream(name, TextUpstream(url, f"sk-{name}"), ALL, retries, fallbacks.get(name, ""))
        for name, url in urls.items()
    ]
    routed = Upstreams(upstreams, rules, answers_all=renderer is None, first_s=0.0)
    engine = engine_of(renderer, "Ours.") if renderer is not None else None
    async with world(folder, renderer, engine, upstream=routed, **more) as w:
        try:
            yield w
        finally:
            await routed.close()


@dataclass
class Wire:
    """What a gateway's client got, and what its upstream was sent and answered, in its own words."""

    body: bytes
    status: int
    got: bytes


async def asked(w: World, dialect: str, body: bytes, key: str = "x") -> Wire:
    headers = {"authorization": f"Bearer {key}", "anthropic-version": "2023-06-01", "content-type": "application/json"}
    got = await w.http.post(f"{PATHS[dialect]}?beta=true", content=body, headers=headers)
    return Wire(body, got.status_code, got.content)


def request(dialect: str, *, streamed: bool, model: str = "far") -> bytes:
    """A request with fields and spaces that nobody here knows."""
    said: dict[str, Any] = {"model": model, "stream": streamed, "a_new_field": [1.50, {"deep": None}]}
    if dialect == "responses":
        said["input"] = [{"role": "user", "content": "hi"}]
    elif dialect == "completions":
        said |= {"prompt": "hi", "max_tokens": 50}
    else:
        said |= {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 50}
    return json.dumps(said, indent=1).encode()


async def played(folder: Path, renderer: TemplateRenderer, dialect: str, *, streamed: bool) -> tuple[bytes, Any]:
    """What a real server of this API answers, and the reply as that server recorded it."""
    async with world(folder, renderer, engine_of(renderer)) as w:
        (kind,) = (kind for kind in SPEAKERS if kind.name == dialect)
        body = {**kind(w).body("hi"), "stream": streamed, **TOOLS[dialect]}
        got = await w.http.post(PATHS[dialect], json=body)
        assert got.status_code == 200, got.text
        (call,) = w.calls()
        return got.content, plain(read(call["request"], call["response"]).replies[0])


SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}
FUNCTIONS = [{"name": name, "description": "d", "parameters": SCHEMA} for name in ("add", "lookup")]
TOOLS: dict[str, dict[str, Any]] = {
    "chat": {"tools": [{"type": "function", "function": function} for function in FUNCTIONS]},
    "completions": {},
    "responses": {"tools": [{"type": "function", **function} for function in FUNCTIONS]},
    "messages": {
        "tools": [{"name": name, "input_schema": SCHEMA} for name in ("add", "lookup")],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    },
}


def plain(message: Any) -> Any:
    """A reply whose arguments are values: texts of JSON may differ in spaces."""
    calls = [
        {**call["function"], "arguments": orjson.loads(call["function"]["arguments"]), "id": call["id"]}
        for call in message.get("tool_calls", ())
    ]
    return message["content"], (message.get("reasoning_content") or "").strip(), calls


@each
@both
async def test_bytes_pass_both_ways_and_the_log_has_what_they_say(
    tmp_path: Path, renderer: TemplateRenderer, dialect: str, streamed: bool
) -> None:
    raw, reply = await played(tmp_path / "far", renderer, dialect, streamed=streamed)
    script = stream(raw[:70], raw[70:]) if streamed else answer(raw)
    async with serving(script) as far:
        rules = [RouteRule("fa*", "far", prices=Prices(1e6, 1e6, 0.0))]
        async with before(tmp_path / "near", renderer, {"far": f"{far.url}/v1"}, rules, keys={"mine": "local"}) as w:
            wire = await asked(w, dialect, request(dialect, streamed=streamed), "mine")
            assert (wire.status, wire.got) == (200, raw)
            ((head, body),) = far.requests
            assert body == wire.body
            assert head.startswith(f"POST {PATHS[dialect]}?beta=true HTTP")
            assert "Bearer sk-far" in head
            assert "anthropic-version: 2023-06-01" in head.lower()
            assert "mine" not in head
            (call,) = w.calls()
            assert (call["trainable"], call["untrainable_reason"]) == (False, UNTRAINABLE)
            assert (call["engine"], call["engine_version"]) == ("far", f"{far.url}/v1")
            assert (call["request"], call["finish_reason"]) == (body, "tool_calls" if reply[2] else "stop")
            assert call["usage"]["completion"] > 0 or (dialect in ("chat", "completions") and streamed)
            assert (call["cost"] or 0) == call["usage"]["prompt"] + call["usage"]["completion"]
            assert plain(read(call["request"], call["response"]).replies[0]) == reply
            if not streamed:
                assert call["response"] == raw
            ours = await asked(w, dialect, request(dialect, streamed=streamed, model="policy"), "mine")
            assert ours.status == 200, "the engines' own door passes over a new field"
            sessions = set(w.gateway.sessions.live)
            assert len(sessions) == 2
        async with before(tmp_path / "near", renderer, {}, []) as w:
            assert (set(w.gateway.sessions.live), w.gateway.sessions.unreadable) == (sessions, set())


@each
async def test_a_stream_is_the_same_wherever_it_is_cut(
    tmp_path_factory: pytest.TempPathFactory, renderer: TemplateRenderer, dialect: str
) -> None:
    raw, reply = await played(tmp_path_factory.mktemp("far"), renderer, dialect, streamed=True)
    reader = READERS[dialect]

    @settings(max_examples=40, database=None, deadline=None)
    @given(st.lists(st.integers(0, len(raw)), max_size=6), st.integers(0, len(raw)))
    def cut(places: list[int], end: int) -> None:
        events, rest = reader.assembler(), 0
        for place in sorted(places):
            events.feed(raw[rest:place])
            rest = place
        events.feed(raw[rest:])
        found = events.response()
        assert plain(reader.answer_in(found).choices[0].message) == reply
        assert events.unread == 0
        broken = reader.assembler()  # as far as it came, it is a call that a start of the gateway reads
        broken.feed(raw[:end])
        broken.finish = "abort"
        response, told = reader.whole(broken, b"")
        assert told is not None
        (said,) = told.answer.choices
        assert reply[0].startswith(said.message["content"])
        assert read(request(dialect, streamed=True), response).replies[0] == said.message

    cut()


@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("speaks", SPEAKERS, ids=lambda kind: kind.name)
async def test_a_conversation_goes_between_engine_and_upstream(
    tmp_path: Path, renderer: TemplateRenderer, speaks: type[Speaker], streamed: bool
) -> None:
    """A whole gateway is the upstream of another, spoken to by real clients; the policy's own turn in between sees all
    of it, also after a start."""
    async with world(tmp_path / "far", renderer, engine_of(renderer)) as far:
        rules = [RouteRule("m", "far")]
        near, urls = tmp_path / "near", {"far": f"{far.url}/v1"}
        async with before(near, renderer, urls, rules) as w:
            session = await w.start()
            client = speaks(w, session["api_key"])
            talk: list[Any] = ["hi"]
            said = await client.say(talk, stream=streamed, tools=("add", "lookup"))
            assert [name for _, name, _ in said.calls] == (["add", "lookup"] if speaks.tools else [])
            results = Results({id: f"{name} is done" for id, name, _ in said.calls})
            talk += [said, results if speaks.tools else "add is done"]
            asked_for = far.calls()[0]["request"]
            assert w.calls()[0]["request"] == asked_for
            assert w.calls()[0]["response_id"] == said.id
        async with before(near, renderer, urls, []) as w:  # no rule: the engine answers
            client = speaks(w, session["api_key"])
            ours = await client.say(talk, stream=streamed, tools=("add", "lookup"))
            assert ours.text == "Ours."
            first, second = w.calls(session["session"])
            assert (first["trainable"], second["trainable"]) == (False, True)
            assert (second["prefix_len"], second["turn"]) == (0, first["turn"] + 1)
            assert second["opened"] == "it is the first call"  # of those with tokens
            told = renderer.tokenizer.decode(w.engine.asked[0].prompt)
            assert "add is done" in told
            assert "hi" in told


async def test_a_model_goes_by_the_name_that_its_rule_says(tmp_path: Path) -> None:
    async with serving(answer(b"{}")) as far:
        rules = [RouteRule("far", "far", send_as="inner")]
        async with before(tmp_path, None, {"far": far.url}, rules) as w:
            await w.http.post(PATHS["chat"], content=b'{ "messages":[],"n": 1.50,\n"model":"far","x":"\\u00e4"}')
            assert far.requests[0][1] == b'{"messages":[],"n":1.50,"model":"inner","x":"\\u00e4"}'
            missing = await w.http.post(PATHS["messages"], json={"model": "other", "messages": []})
            assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
            counted = await w.http.post(f"{PATHS['messages']}/count_tokens", json={"model": "far"})
            assert (counted.status_code, counted.content) == (200, b"{}")
            assert far.requests[-1][0].startswith("POST /messages/count_tokens ")
            listed = (await w.http.get("/v1/models")).json()["data"]
            assert [model["id"] for model in listed] == ["policy", "far"]
            for name, status in (("policy", 200), ("far", 200), ("a%2Fb", 404)):
                one = await w.http.get(f"/v1/models/{name}")
                assert one.status_code == status
                assert one.json() in listed or one.json()["error"]["code"] == "model_not_found"


@each
@both
async def test_what_nobody_here_reads_passes_and_leaves_a_gap(tmp_path: Path, dialect: str, streamed: bool) -> None:
    odd = json.dumps({"model": "far", "stream": streamed, "messages": 7, "input": 7}).encode()
    said = b"data: ?\n\n" if streamed else b"[]"
    async with (
        serving(stream(said) if streamed else answer(said)) as far,
        before(tmp_path, None, {"far": far.url}, [RouteRule("*", "far")]) as w,
    ):
        for body in (odd, request(dialect, streamed=streamed)):
            wire = await asked(w, dialect, body)
            assert (wire.status, wire.got) == (200, said)
            assert far.requests[-1][1] == body
        assert [event["kind"] for event in w.events()] == ["episode_started", "gap"] * 2
        assert (await asked(w, dialect, b"{")).status == 400
        assert len(far.requests) == 2


@each
@pytest.mark.parametrize("odd", [b"[" * 90 + b"]" * 90, b"[" + b"0," * bounds.VALUES + b"0]"], ids=["deep", "many"])
async def test_a_request_beyond_what_is_read_here_passes_and_leaves_a_gap(
    tmp_path: Path, dialect: str, odd: bytes
) -> None:
    body = request(dialect, streamed=False).replace(b"{", b'{"more": ' + odd + b",", 1)
    async with (
        serving(answer(b"[]")) as far,
        before(tmp_path, None, {"far": far.url}, [RouteRule("*", "far")]) as w,
    ):
        wire = await asked(w, dialect, body)
        assert (wire.status, far.requests[-1][1]) == (200, body)
        assert [event["kind"] for event in w.events()] == ["episode_started", "gap"]


@each
async def test_an_event_is_told_before_the_next_one_comes(
    tmp_path: Path, renderer: TemplateRenderer, dialect: str
) -> None:
    raw, _ = await played(tmp_path / "far", renderer, dialect, streamed=True)
    first = raw[: raw.index(b"\n\n") + 2]
    told = asyncio.Event()

    async def script(writer: asyncio.StreamWriter) -> None:
        head = b"HTTP/1.1 200 X\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(head + b"%x\r\n" % len(first) + first + b"\r\n")
        await writer.drain()
        await told.wait()
        writer.write(b"%x\r\n" % (len(raw) - len(first)) + raw[len(first) :] + b"\r\n0\r\n\r\n")

    async with (
        serving(script) as far,
        before(tmp_path / "near", None, {"far": far.url}, [RouteRule("*", "far")]) as w,
        w.http.stream("POST", PATHS[dialect], content=request(dialect, streamed=True), timeout=60) as got,
    ):
        came = b""
        async for part in got.aiter_raw():
            came += part
            if came == first:
                told.set()
        assert came == raw


@each
async def test_what_ends_a_reply_is_told_once_it_is_recorded(
    tmp_path: Path, renderer: TemplateRenderer, dialect: str
) -> None:
    raw, _ = await played(tmp_path, renderer, dialect, streamed=True)
    events, told = READERS[dialect].assembler(), list[bool]()
    for event in raw.split(b"\n\n")[:-1]:
        events.feed(event + b"\n\n")
        told.append(events.closing)
    assert (told[0], told[-1]) == (False, True)
    assert told == sorted(told), "a reply that came to its end stays there"


async def told(
    folder: Path, scripts: Sequence[Script], dialect: str, *, streamed: bool, **more: Any
) -> tuple[Wire, FakeServer, list[dict[str, Any]]]:
    """A call where the upstream answers with `scripts`, one after the other, and a fallback with what it got."""
    async with serving(*scripts) as far, serving(answer(b"{}")) as behind:
        urls = {"far": far.url, "behind": behind.url}
        async with before(folder, None, urls, [RouteRule("*", "far")], **more) as w:
            wire = await asked(w, dialect, request(dialect, streamed=streamed))
            assert all(body == wire.body for _, body in [*far.requests, *behind.requests])
            far.requests += behind.requests
            return wire, far, w.events()


BUSY = answer(b'{"error": 1}', 529)


@each
@both
async def test_a_call_is_sent_again_before_its_client_got_a_byte(tmp_path: Path, dialect: str, streamed: bool) -> None:
    good = stream(b"data: 1\n\n") if streamed else answer(b"{}")
    wire, far, _ = await told(tmp_path, [BUSY, hang_up, good], dialect, streamed=streamed, retries=2)
    assert (wire.status, len(far.requests)) == (200, 3)


@both
async def test_a_fallback_answers_where_retries_do_not_help(tmp_path: Path, streamed: bool) -> None:
    more: dict[str, Any] = {"retries": 1, "fallbacks": {"far": "behind"}}
    wire, far, _ = await told(tmp_path / "a", [BUSY], "chat", streamed=streamed, **more)
    assert (wire.status, wire.got, len(far.requests)) == (200, b"{}", 3)
    assert "Bearer sk-behind" in far.requests[-1][0]
    refused = answer(b'{"error": "no"}', 400)  # the same bytes would be refused again
    wire, far, events = await told(tmp_path / "b", [refused], "chat", streamed=streamed, **more)
    assert (wire.status, wire.got, len(far.requests), events) == (400, b'{"error": "no"}', 1, [])


@each
@both
async def test_nobody_left_to_ask(tmp_path: Path, dialect: str, streamed: bool) -> None:
    """The last refusal passes as it is; no answer at all is an error of the call's API, and no trace in the log."""
    wire, far, events = await told(tmp_path / "a", [BUSY], dialect, streamed=streamed, retries=1)
    assert (wire.status, wire.got, len(far.requests), events) == (529, b'{"error": 1}', 2, [])
    wire, far, events = await told(tmp_path / "b", [hang_up], dialect, streamed=streamed)
    assert (wire.status, len(far.requests), events) == (502, 1, [])
    error = orjson.loads(wire.got)
    assert error["error"]["type"] == ("api_error" if dialect == "messages" else "server_error")
    assert (error.get("type") == "error") == (dialect == "messages")


@each
async def test_a_stream_that_breaks_off_is_not_sent_again(
    tmp_path: Path, renderer: TemplateRenderer, dialect: str
) -> None:
    raw, _ = await played(tmp_path / "far", renderer, dialect, streamed=True)
    whole = raw[: raw.index(b"\n\n", len(raw) // 2) + 2]
    more: dict[str, Any] = {"retries": 2, "fallbacks": {"far": "behind"}}
    wire, far, events = await told(tmp_path / "a", [stream(whole, then="cut")], dialect, streamed=True, **more)
    assert (wire.status, len(far.requests)) == (200, 1)
    assert wire.got.startswith(whole)
    assert b"error" in wire.got[len(whole) :]
    assert [event["kind"] for event in events] == ["episode_started", "model_call"]
    assert events[-1]["data"]["finish_reason"] == "abort"
