"""No request of any shape, and no answer of any engine or upstream, ends a gateway or keeps it from starting again.

Laws, for every input: no answer is 500; every refusal is an error in the shape of its API; what is not served is
refused; nothing is logged with a traceback; `/health` answers in between; refine takes every event that was captured;
and a gateway that is built anew from the capture log starts, knows every session that it can continue, and finds none
that it cannot read.

`MILLRACE_FUZZ` says how many inputs (`make fuzz N=1000000`), `MILLRACE_FUZZ_SEED` which (`SEED=2`: others than
`SEED=1`); a failure names its seed."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest

from millrace.dialects.rendering.template import TemplateRenderer
from millrace.dialects.rendering.tokenizer import ChatTokenizer
from millrace.producers.capture.log import CaptureLog
from millrace.schemas import bounds, codec
from millrace.schemas.limits import beyond
from millrace.streams.refine.validate import Refusal, check_link, decode_body
from tests.fuzz.completions_fuzz import UNSERVED as UNSERVED_COMPLETIONS
from tests.fuzz.completions_fuzz import CompletionsTraffic
from tests.fuzz.every_fuzz import EveryTraffic
from tests.fuzz.fuzz_counts import Part
from tests.fuzz.gateway_fuzz import KEYS, LABELLED, UNSERVED, Traffic
from tests.fuzz.messages_fuzz import LABELLED as LABELLED_MESSAGES
from tests.fuzz.messages_fuzz import PATH as MESSAGES
from tests.fuzz.messages_fuzz import UNSERVED as UNSERVED_MESSAGES
from tests.fuzz.messages_fuzz import MessagesTraffic
from tests.fuzz.responses_fuzz import UNSERVED as UNSERVED_RESPONSES
from tests.fuzz.responses_fuzz import ResponsesTraffic
from tests.support import chat_tokenizer, odd_json
from tests.support.gateway_world import ScriptedEngine, world
from tests.support.in_process import Answer, InProcess, Loud

ASKED = int(os.environ.get("MILLRACE_FUZZ", "0"))
OTHERS = int(os.environ.get("MILLRACE_FUZZ_SEED") or 0)
ROUND = 750
"""inputs between two starts of the gateway"""
FRESH = 3
"""starts on one folder"""
HEALTH = 50
BUDGET, UPSTREAM_BUDGET, EVERY_BUDGET = 1500, 1000, 2000
"""inputs to engines, to an upstream, and over every route, where nobody asks for more; `test_finds.py` shows what they
find"""
LABELLED_COMPLETIONS = {name: LABELLED[name] for name in ("frequency_penalty", "logit_bias")}
SEEDS = (1, 11) if ASKED else (1,)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> TemplateRenderer:
    return TemplateRenderer(ChatTokenizer(chat_tokenizer.write(tmp_path_factory.mktemp("chat"))))


@pytest.fixture
def loud() -> Iterator[Loud]:
    """What the gateway's modules log with a traceback; the rest of their log is not worth a million lines."""
    handler, logger = Loud(), logging.getLogger("millrace")
    level, before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.ERROR)
    logger.propagate = False
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)
    logger.propagate = before


def check(path: str, answer: Answer) -> None:
    assert answer.status not in (0, 500), answer
    if answer.status < 400 or answer.headers.get("content-type") != "application/json":
        return
    if path.startswith(MESSAGES):
        assert set(answer.json) == {"type", "error"}, answer
        assert set(answer.json["error"]) == {"type", "message"}, answer
    else:
        assert set(answer.json["error"]) == {"message", "type", "param", "code"}, answer


def check_served(body: bytes) -> None:
    """What is not served is refused, never ignored, and so is a name beyond its bound."""
    asked = json.loads(body.decode(errors="replace"), parse_int=float)  # whatever its size
    for name, value in UNSERVED.items():
        assert asked.get(name) != value, name
    for message in asked["messages"]:
        calls = message.get("tool_calls") or ()
        names = [message.get("tool_call_id"), message.get("name")]
        for name in (*names, *(call.get("id") for call in calls), *(call["function"]["name"] for call in calls)):
            assert len((name or "").encode(errors="replace")) <= bounds.NAME_BYTES, name[:20]


def check_served_message(body: bytes) -> None:
    """The same of a message."""
    asked = json.loads(body.decode(errors="replace"), parse_int=float)
    for name, value in UNSERVED_MESSAGES.items():
        assert asked.get(name) != value, name
    blocks = [block for message in asked["messages"] for block in message["content"] if isinstance(block, dict)]
    for name in (block.get(field) for block in blocks for field in ("id", "name", "tool_use_id")):
        assert not isinstance(name, str) or len(name.encode(errors="replace")) <= bounds.NAME_BYTES, name[:20]


def check_served_response(body: bytes) -> None:
    """The same of a response."""
    asked = json.loads(body.decode(errors="replace"), parse_int=float)
    for name, value in UNSERVED_RESPONSES.items():
        assert asked.get(name) != value, name
    items = asked["input"] if isinstance(asked["input"], list) else []
    for name in (item.get(field) for item in items for field in ("call_id", "name")):
        assert not isinstance(name, str) or len(name.encode(errors="replace")) <= bounds.NAME_BYTES, name[:20]


def check_labelled(body: bytes, labelled: Mapping[str, Any], log: CaptureLog, first: int) -> None:
    """A reply that the request alters or holds never trains; its records lie from `first` on."""
    asked = json.loads(body.decode(errors="replace"), parse_int=float)
    if any(asked.get(name) == value for name, value in labelled.items()):
        for kept in log.read(first):
            event = codec.decode_as("Event", kept.entry.value)
            if event["kind"] == "model_call":
                call = codec.decode_body("model_call", event["body"])
                assert not call["trainable"], asked


def check_served_completion(body: bytes) -> None:
    """The same of a completion."""
    asked = json.loads(body.decode(errors="replace"), parse_int=float)
    for name, value in UNSERVED_COMPLETIONS.items():
        assert asked.get(name) != value, name


def check_engines(path: str, body: bytes, log: CaptureLog, first: int) -> None:
    """An engine's reply is to what is served, and trains only where nothing altered it."""
    match path:
        case "/v1/chat/completions":
            check_served(body)
            check_labelled(body, LABELLED, log, first)
        case "/v1/messages":
            check_served_message(body)
            check_labelled(body, LABELLED_MESSAGES, log, first)
        case "/v1/responses":
            check_served_response(body)
        case "/v1/completions":
            check_served_completion(body)
            check_labelled(body, LABELLED_COMPLETIONS, log, first)


def check_captured(log: CaptureLog, first: int) -> int:
    """What the gateway wrote from number `first` on is taken by refine; gives the number after it."""
    for kept in log.read(first):
        assert all(len(text.encode()) <= bounds.NAME_BYTES for text in kept.entry.headers.values()), kept.entry.headers
        event = codec.decode_as("Event", kept.entry.value)
        check_link(event)
        found = beyond("Event", event)
        assert found is None, found
        try:
            decode_body(event)
        except Refusal as refusal:
            raise AssertionError(f"a {event['kind']} that refine refuses: {refusal.code}, {refusal}") from None
    return log.end


async def rounds(
    folder: Path,
    renderer: TemplateRenderer,
    loud: Loud,
    inputs: int,
    *,
    upstream: bool,
    seed: int,
    kind: type[Traffic] = Traffic,
) -> None:
    """Send `inputs` requests, with a start of the gateway after each `ROUND` of them."""
    part, captured = Part(f"{kind.__name__}-{'upstream' if upstream else 'engine'}-{seed}", inputs), 0
    seed += 1000 * OTHERS
    traffic = kind(seed * 1_000_003, renderer)
    for number in range(-(-inputs // ROUND)):
        if number % FRESH == 0:
            captured = 0
        if number and number % FRESH == 0:
            traffic = kind(seed * 1_000_003 + number, renderer)
        place = folder / str(number // FRESH)
        script = traffic.upstream if upstream else traffic.engine
        given = {"upstream": upstream, "keys": KEYS, **traffic.parts}
        gateway = InProcess(place, renderer, script, rollout_key="sk-one", max_model_len=600, **given)
        assert not gateway.sessions.unreadable, f"round {number} of seed {seed}: {gateway.sessions.unreadable}"
        for at in range(min(ROUND, inputs - number * ROUND)):
            path, body, before = "", b"", gateway.log.end
            try:
                path, body, answer = await traffic.one(gateway)
                check(path, answer)
                if not upstream and traffic.passed is None and answer.status == 200 and answer.body:
                    check_engines(path, body, gateway.log, before)
                traffic.check(gateway, path, body, answer, before)
                assert not loud.faults, loud.faults[0]
                if at % HEALTH == 0:
                    assert (await gateway.ask("GET", "/health")).json == {"status": "ok"}
            except Exception as error:
                print(f"input {at} of round {number} of seed {seed}: {path} {body[:2000]!r}")
                raise AssertionError(str(error)) from error
            part.add(answer.status)
        captured = check_captured(gateway.log, captured)
        live = {session.id for session in gateway.sessions.live.values() if session.step}
        await gateway.close()
        again = InProcess(place, renderer, script, **given)
        assert set(again.sessions.live) == live, f"round {number} of seed {seed}"
        await again.close()
    part.end()


def share(part: float, otherwise: int) -> int:
    """Inputs of one test of a run that asked for some; `otherwise` without."""
    return int(ASKED * part) or otherwise


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
async def test_no_request_over_any_route_ends_it(
    tmp_path: Path, renderer: TemplateRenderer, loud: Loud, seed: int
) -> None:
    """Every API, HTTP and WebSockets, policies and versions, before engines and an upstream beside them."""
    inputs = share(0.4 / len(SEEDS), EVERY_BUDGET)
    await rounds(tmp_path, renderer, loud, inputs, upstream=False, seed=seed + 6, kind=EveryTraffic)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
async def test_no_request_and_no_engine_ends_it(
    tmp_path: Path, renderer: TemplateRenderer, loud: Loud, seed: int
) -> None:
    await rounds(tmp_path, renderer, loud, share(0.2 / len(SEEDS), BUDGET), upstream=False, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("upstream", [False, True], ids=["engine", "upstream"])
async def test_no_message_ends_it(tmp_path: Path, renderer: TemplateRenderer, loud: Loud, upstream: bool) -> None:
    await rounds(tmp_path, renderer, loud, share(0.05, 1000), upstream=upstream, seed=4, kind=MessagesTraffic)


@pytest.mark.slow
async def test_no_response_ends_it(tmp_path: Path, renderer: TemplateRenderer, loud: Loud) -> None:
    await rounds(tmp_path, renderer, loud, share(0.1, 800), upstream=False, seed=6, kind=ResponsesTraffic)


@pytest.mark.slow
async def test_no_completion_ends_it(tmp_path: Path, renderer: TemplateRenderer, loud: Loud) -> None:
    await rounds(tmp_path, renderer, loud, share(0.05, 800), upstream=False, seed=8, kind=CompletionsTraffic)


@pytest.mark.slow
async def test_no_upstream_ends_it(tmp_path: Path, renderer: TemplateRenderer, loud: Loud) -> None:
    await rounds(tmp_path, renderer, loud, share(0.1, UPSTREAM_BUDGET), upstream=True, seed=2)


@pytest.mark.slow
@pytest.mark.skipif(bool(ASKED), reason="the others send as many as were asked for")
@pytest.mark.parametrize(
    ("kind", "upstream"),
    [(Traffic, False), (Traffic, True), (EveryTraffic, False)],
    ids=["engine", "upstream", "every"],
)
async def test_more_of_the_same(
    tmp_path: Path, renderer: TemplateRenderer, loud: Loud, kind: type[Traffic], upstream: bool
) -> None:
    await rounds(tmp_path, renderer, loud, 6_000, upstream=upstream, seed=3, kind=kind)


# ---------------------------------------------------------------------- bytes


REQUESTS = (
    b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 59\r\nConnection: close\r\n\r\n"
    b'{"model":"m","messages":[{"role":"user","content":"hello"}]}',
    b"POST /v1/sessions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    b"2\r\n{}\r\n0\r\n\r\n",
    b"POST /v1/sessions/x/end HTTP/1.0\r\nAuthorization: Bearer mr-x.y\r\n\r\n",
)


async def raw(port: int, data: bytes) -> bytes:
    """What comes back for some bytes, after which the client has no more to say."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        writer.write_eof()
        return await asyncio.wait_for(reader.read(), 120)
    except OSError:
        return b""
    finally:
        writer.close()


async def test_no_bytes_end_it(tmp_path: Path, renderer: TemplateRenderer, loud: Loud) -> None:
    r, inputs = Random(5 + OTHERS), share(0.05, 300)
    engine = ScriptedEngine(lambda *_: renderer.tokenizer.encode("x<|im_end|>"))
    part = Part("bytes", inputs)
    async with world(tmp_path, renderer, engine, body_timeout_s=5.0) as w:
        port = int(w.url.rsplit(":", 1)[1])
        for _ in range(-(-inputs // 20)):
            sent = [odd_json.broken(r, r.choice(REQUESTS)) for _ in range(20)]
            for data, got in zip(sent, await asyncio.gather(*(raw(port, data) for data in sent)), strict=True):
                assert not got.startswith(b"HTTP/1.1 500"), data
                assert not loud.faults, (data, loud.faults[0])
                part.add(got[9:12].decode("latin-1") or "dropped")
            assert (await w.http.get("/health")).status_code == 200
    part.end()
