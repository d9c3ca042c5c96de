"""What a key bears of an upstream's answer, however little of it came or can be read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.dialects.answers import bytes_in
from millrace.infra.engines.upstream import TextUpstream
from millrace.producers.gateway.prices import Prices
from millrace.producers.gateway.spending import KeyLimits, bill_usage, estimate
from millrace.producers.gateway.upstreams.routes import RouteRule
from millrace.producers.gateway.upstreams.upstreams import Upstream, Upstreams
from tests.support.fake_http import FakeServer, Script, answer, serving, stream
from tests.support.gateway_world import World, world
from tests.support.upstream_answers import READERS, REQUEST

HEADERS = {"authorization": "Bearer sk-mine"}
PATHS = {api: reader.dialect.path for api, reader in READERS.items()}
each = pytest.mark.parametrize("api", sorted(READERS))


@asynccontextmanager
async def before(folder: Path, *scripts: Script, **more: Any) -> AsyncIterator[tuple[World, FakeServer]]:
    """A gateway before one upstream of every API, and one key."""
    async with serving(*scripts) as far:
        named = Upstream("far", TextUpstream(far.url, "sk-far"), frozenset(READERS))
        upstreams = Upstreams([named], [RouteRule("*", "far", prices=Prices(1e6, 1e6, 1e6))], answers_all=True)
        own: dict[str, Any] = {"keys": {"sk-mine": "local"}, "key_names": {"sk-mine": "mine"}}
        async with world(folder, None, None, upstream=upstreams, limits={"mine": KeyLimits(budget=1e9)}, **own) as w:
            try:
                yield w, far
            finally:
                await upstreams.close()


def spent(w: World) -> int:
    """Of the budget of the one key, which costs one for each token."""
    return int(w.gateway.recorder.spending.used("mine", 0).money)


# ---------------------------------------------------------------------- any prefix of any stream

Said = tuple[str, str]
KINDS: dict[str, dict[str, Any]] = {
    "chat": {
        "content": lambda text: {"content": text},
        "parts": lambda text: {"content": [{"type": "text", "text": text}]},
        "thoughts": lambda text: {"reasoning": text},
        "refusal": lambda text: {"refusal": text},
        "unknown": lambda text: {"a_new_field": text},
        "audio": lambda text: {"audio": {"id": "a", "transcript": text}},
        "call": lambda text: {"tool_calls": [{"index": 0, "function": {"arguments": text}}]},
        "function": lambda text: {"function_call": {"arguments": text}},
    },
    "messages": {
        "text_delta": lambda text: {"text": text},
        "thinking_delta": lambda text: {"thinking": text},
        "signature_delta": lambda text: {"signature": text},
        "input_json_delta": lambda text: {"partial_json": text},
        "a_new_delta": lambda text: {"words": text},
    },
    "responses": {
        name: lambda text: {"delta": text}
        for name in (
            "response.output_text.delta",
            "response.refusal.delta",
            "response.reasoning_text.delta",
            "response.reasoning_summary_text.delta",
            "response.function_call_arguments.delta",
            "response.custom_tool_call_input.delta",
            "response.a_new_kind.delta",
        )
    },
    "completions": {"text": lambda text: {"text": text}},
}
"""in each API the ways in which an event says something"""


def event(api: str, kind: str, text: str) -> dict[str, Any]:
    """One event that says this."""
    given = KINDS[api][kind](text)
    match api:
        case "chat":
            return {"id": "c", "choices": [{"index": 0, "delta": given}]}
        case "completions":
            return {"id": "t", "object": "text_completion", "choices": [{"index": 0, **given}]}
        case "messages":
            return {"type": "content_block_delta", "index": 0, "delta": {"type": kind, **given}}
    return {"type": kind, "output_index": 0, **given}


def opening(api: str) -> list[dict[str, Any]]:
    """The events with which a stream of an API begins; that of messages counts tokens of a reply that is to come."""
    match api:
        case "messages":
            usage = {"input_tokens": 7, "output_tokens": 1}
            block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
            return [{"type": "message_start", "message": {"type": "message", "id": "m", "usage": usage}}, block]
        case "responses":
            item = {"type": "response.output_item.added", "output_index": 0, "item": {"type": "message", "id": "i"}}
            return [{"type": "response.created", "response": {"id": "r", "object": "response"}}, item]
    return []


def sse(given: Any) -> bytes:
    return b"data: " + orjson.dumps(given) + b"\n\n"


@each
def test_a_reply_that_is_cut_off_bears_what_was_passed_on_and_never_less_than_before(api: str) -> None:
    pieces = st.tuples(st.sampled_from(sorted(KINDS[api])), st.text(min_size=1, max_size=40))
    odd = st.sampled_from([b"data: {broken\n\n", b'data: [1, "x"]\n\n', b'{"no": "event"}\n', b": a comment\n\n"])

    @settings(max_examples=60, database=None, deadline=None)
    @given(st.lists(pieces | odd, max_size=12), st.integers(1, 60))
    def holds(given: list[Any], part: int) -> None:
        raw = [sse(one) for one in opening(api)]
        events, before, told = READERS[api].assembler(), 0, 0
        for one in [*raw, *given]:
            data = sse(event(api, *one)) if isinstance(one, tuple) else one
            for at in range(0, len(data), part):
                events.feed(data[at : at + part])
            told += len(one[1].encode(errors="surrogatepass")) if isinstance(one, tuple) else 0
            events.finish = "abort"
            _, read = READERS[api].whole(events, b"")
            events.finish = None
            assert read is not None
            size = read.size + events.unread_bytes
            _, completion, _ = bill_usage(read.answer.usage, 0, size, final=False)
            assert completion >= estimate(told)
            assert completion >= before
            before = completion

    holds()


@given(*[st.integers(0, 1000)] * 5, st.booleans())
def test_what_was_counted_to_the_end_is_what_a_call_bears(
    prompt: int, completion: int, cached: int, asked: int, said: int, final: bool
) -> None:
    bears = bill_usage((prompt, completion, cached), asked, said, final=final)
    assert bears[0] == (prompt or estimate(asked))
    assert bears[1] >= completion
    assert bears[1] == completion or bears[1] == estimate(said)
    if final and completion:
        assert bears[1] == completion
    else:
        assert bears[1] >= estimate(said)


@given(
    st.recursive(
        st.text() | st.integers() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_bytes_of_a_value_are_those_of_its_texts(value: Any) -> None:
    def texts(value: Any) -> int:
        if isinstance(value, str):
            return len(value.encode(errors="surrogatepass"))
        items = value if isinstance(value, list) else value.values() if isinstance(value, dict) else ()
        return sum(texts(item) for item in items)

    assert bytes_in(value) == texts(value)


# ---------------------------------------------------------------------- through the gateway


@pytest.mark.parametrize("cut", ["left", "broken"])
async def test_a_message_that_is_cut_off_bears_its_texts(tmp_path: Path, cut: str) -> None:
    text = "all the words of a long reply " * 40
    said = [*opening("messages"), event("messages", "text_delta", text)]
    script = stream(*(sse(one) for one in said), then="hang" if cut == "left" else "cut")
    async with before(tmp_path, script) as (w, _):
        body = {**json.loads(REQUEST["messages"]), "stream": True}
        async with w.http.stream("POST", PATHS["messages"], json=body, headers=HEADERS) as got:
            async for part in got.aiter_bytes():
                if cut == "left" and b"all the words" in part:
                    break
        while not w.calls():
            await asyncio.sleep(0.01)
        (call,) = w.calls()
        assert (call["finish_reason"], call["cost"]) == ("abort", None)
        assert spent(w) >= 7 + estimate(len(text))


async def test_a_message_that_came_to_its_end_bears_what_was_counted(tmp_path: Path) -> None:
    end = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 5}}
    said = [*opening("messages"), event("messages", "text_delta", "words " * 100), end]
    async with before(tmp_path, stream(*(sse(one) for one in said))) as (w, _):
        body = {**json.loads(REQUEST["messages"]), "stream": True}
        await w.http.post(PATHS["messages"], json=body, headers=HEADERS)
        assert [call["cost"] for call in w.calls()] == [spent(w)] == [12]


@each
@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("said", [b'"' + b"x" * 400 + b'"', b"x" * 400, b'{"unknown": "' + b"x" * 400 + b'"}'])
async def test_what_nobody_can_read_counts_by_its_bytes(tmp_path: Path, api: str, streamed: bool, said: bytes) -> None:
    body = orjson.dumps({**orjson.loads(REQUEST[api]), "stream": streamed})
    async with before(tmp_path, answer(said)) as (w, _):
        got = await w.http.post(PATHS[api], content=body, headers=HEADERS)
        assert (got.status_code, got.content) == (200, said)
        assert not w.calls()
        assert spent(w) >= estimate(len(body)) + estimate(len(said)) - 5
    async with before(tmp_path) as (w, _):
        assert spent(w) >= estimate(len(body)) + estimate(len(said)) - 5, "a start reads it from the log"


async def test_a_request_that_nobody_can_read_counts_too(tmp_path: Path) -> None:
    body = b'{"model": "far", "messages": "' + b"x" * 400 + b'"}'
    told = {"id": "c", "choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4}}
    async with before(tmp_path, answer(b"{}"), answer(orjson.dumps(told))) as (w, _):
        assert (await w.http.post(PATHS["chat"], content=body, headers=HEADERS)).content == b"{}"
        first = spent(w)
        assert first >= estimate(len(body))
        await w.http.post(PATHS["chat"], content=body, headers=HEADERS)
        assert spent(w) == first + 13


# ---------------------------------------------------------------------- an answer that breaks off unstreamed


def cut(body: bytes, said: int) -> Script:
    """An answer of so many bytes, of which these come."""

    async def script(writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {said}\r\n\r\n".encode())
        writer.write(body)
        await writer.drain()
        writer.close()

    return script


@each
async def test_an_answer_that_breaks_off_is_paid_for_and_labelled(tmp_path: Path, api: str) -> None:
    async with before(tmp_path, cut(b"x" * 400, 1000)) as (w, _):
        got = await w.http.post(PATHS[api], content=REQUEST[api], headers=HEADERS)
        assert (got.status_code, w.calls()) == (502, [])
        paid = estimate(len(REQUEST[api])) + estimate(400)
        assert spent(w) == paid
        start, gap = w.events()
        assert (start["kind"], gap["data"]["reason"]) == ("episode_started", "the upstream broke off its answer")
    async with before(tmp_path, answer(b"{}")) as (w, _):  # a start knows what it cost
        assert spent(w) == paid


@pytest.mark.parametrize(
    ("last", "status"),
    [(answer(b'{"id": "c", "choices": []}'), 200), (answer(b"no", 400), 400), (answer(b"", 503), 503)],
)
async def test_every_attempt_that_broke_off_is_paid_for(tmp_path: Path, last: Script, status: int) -> None:
    """Whatever the last one came to; one that was refused costs nothing."""
    async with serving(cut(b"x" * 400, 1000), cut(b"x" * 200, 1000), last) as far:
        named = Upstream("far", TextUpstream(far.url), frozenset(READERS), retries=2)
        upstreams = Upstreams(
            [named], [RouteRule("*", "far", prices=Prices(1e6, 1e6, 1e6))], answers_all=True, first_s=0.0
        )
        own: dict[str, Any] = {"keys": {"sk-mine": "local"}, "key_names": {"sk-mine": "mine"}}
        async with world(tmp_path, None, None, upstream=upstreams, limits={"mine": KeyLimits(budget=1e9)}, **own) as w:
            got = await w.http.post(PATHS["chat"], content=REQUEST["chat"], headers=HEADERS)
            assert got.status_code == status
            asked = estimate(len(REQUEST["chat"]))
            answered = asked + estimate(len(b'{"id": "c", "choices": []}')) if status == 200 else 0
            assert spent(w) == 2 * asked + estimate(400) + estimate(200) + answered


async def test_embeddings_that_break_off_are_paid_for(tmp_path: Path) -> None:
    async with serving(cut(b"x" * 400, 1000), cut(b"x" * 200, 1000), answer(b"no", 400)) as far:
        named = Upstream("far", TextUpstream(far.url), frozenset({"embeddings"}), retries=2)
        upstreams = Upstreams(
            [named], [RouteRule("*", "far", prices=Prices(1e6, 1e6, 1e6))], answers_all=True, first_s=0.0
        )
        own: dict[str, Any] = {"keys": {"sk-mine": "local"}, "key_names": {"sk-mine": "mine"}}
        async with world(tmp_path, None, None, upstream=upstreams, limits={"mine": KeyLimits(budget=1e9)}, **own) as w:
            body = b'{"model": "far", "input": "hi"}'
            got = await w.http.post("/v1/embeddings", content=body, headers=HEADERS)
            assert (got.status_code, spent(w)) == (400, 2 * estimate(len(body)))


async def test_a_refusal_that_breaks_off_costs_nothing(tmp_path: Path) -> None:
    async def refused(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad\r\ncontent-length: 100\r\n\r\nno")
        await writer.drain()
        writer.close()

    async with before(tmp_path, refused) as (w, _):
        await w.http.post(PATHS["chat"], content=REQUEST["chat"], headers=HEADERS)
        assert (spent(w), w.events()) == (0, [])
