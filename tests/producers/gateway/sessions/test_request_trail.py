"""A conversation is stored once: what the log holds of its calls grows with what is new in them, and says all of it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.dialects.rendering.template import TemplateRenderer
from millrace.infra.engines.upstream import TextUpstream
from millrace.producers.gateway.sessions.request_trail import MOST, RequestTrail
from millrace.schemas import codec
from millrace.schemas.requests import LEAST, RequestStore, outline_request
from tests.support.fake_http import answer, serving
from tests.support.gateway_world import ScriptedEngine, World, world

TOOLS = [
    {"type": "function", "function": {"name": f"tool_{n}", "description": "d" * 200, "parameters": {"type": "object"}}}
    for n in range(5)
]
TEXTS = st.lists(st.sampled_from(["a", "b", "c"]).map(lambda one: one * 300), min_size=1, max_size=3)


def body(texts: list[str]) -> bytes:
    return orjson.dumps({"model": "m", "messages": [{"role": "user", "content": text} for text in texts]})


@given(st.lists(st.tuples(st.integers(0, 30), TEXTS, st.booleans()), max_size=30))
def test_whoever_reads_in_order_has_every_request_whole(calls: list[tuple[int, list[str], bool]]) -> None:
    """Conversations that go on from any earlier place, in turn; some records are lost."""
    trail, store, said = RequestTrail(), RequestStore(), list[list[str]]()
    for at, (back, texts, recorded) in enumerate(calls):
        said.append([*(said[-1 - back % len(said)] if said else []), *texts])
        sent = body(said[-1])
        stored = trail.compress(sent, outline_request(sent))
        if recorded:
            call = {"request": stored.request, "request_base": stored.base, "request_kept": stored.overlap}
            assert store.add(f"e{at}", call) == sent
            trail.add(f"e{at}", outline_request(sent))
        assert len(trail.known) <= MOST


def test_so_many_conversations_of_a_session_are_gone_on_with() -> None:
    """Each of them costs what is new in it, whichever of them is gone on with, and one more is whole again."""
    trail = RequestTrail()
    talks = [[f"conversation {n} " + "x" * 1000] for n in range(MOST)]
    for turn in range(3):
        for n, talk in enumerate(talks):
            talk.append(f"turn {turn}")
            sent = body(talk)
            stored = trail.compress(sent, outline_request(sent))
            assert (stored.base is None) == (turn == 0)
            assert len(stored.request) < 300 or turn == 0
            trail.add(f"{n} {turn}", outline_request(sent))


def stored_calls(w: World) -> list[dict[str, Any]]:
    """The model calls as they lie in the log."""
    events = [codec.decode_as("Event", kept.entry.value) for kept in w.log.read()]
    return [codec.decode_body(one["kind"], one["body"]) for one in events if one["kind"] == "model_call"]


@pytest.mark.parametrize("choices", [1, 3])
async def test_a_long_conversation_is_stored_once_over_restarts(
    tmp_path: Path, renderer: TemplateRenderer, choices: int
) -> None:
    engine = ScriptedEngine(lambda *_: renderer.tokenizer.encode("Yes.<|im_end|>"))
    talk: list[dict[str, Any]] = [{"role": "system", "content": "s" * 1000}]
    sent: list[bytes] = []
    for turn in range(12):
        async with world(tmp_path, renderer, engine, max_model_len=1 << 17) as w:
            talk.append({"role": "user", "content": f"{turn} " + "u" * 100})
            asked = json.dumps({"model": "m", "messages": talk, "tools": TOOLS, "n": choices}).encode()
            sent.append(asked)
            got = await w.http.post("/v1/chat/completions", content=asked, headers={"authorization": "Bearer x"})
            assert got.status_code == 200, got.text
            talk.append(got.json()["choices"][0]["message"])
            assert not w.gateway.sessions.unreadable
    async with world(tmp_path, renderer, engine, max_model_len=1 << 17) as w:
        assert len(w.gateway.sessions.live) == 1
        assert [call["request"] for call in w.calls()] == [one for one in sent for _ in range(choices)]
        sizes = [len(call["request"]) for call in stored_calls(w)]
        assert sizes[0] == len(sent[0])
        assert max(sizes[1:]) < LEAST, "each later record has the newest message, and no tools"
        assert all(call["trainable"] for call in w.calls())


async def test_what_passes_to_an_upstream_is_stored_once(tmp_path: Path) -> None:
    reply = {"index": 0, "message": {"role": "assistant", "content": "Hello."}, "finish_reason": "stop"}
    scripts = [answer(orjson.dumps({"id": f"chatcmpl-{n}", "choices": [reply]})) for n in range(6)]
    async with serving(*scripts) as server:

        def behind() -> TextUpstream:
            return TextUpstream(f"{server.url}/v1", "sk-upstream")

        talk: list[dict[str, Any]] = []
        sent: list[bytes] = []
        for turn in range(6):
            async with world(tmp_path, None, None, upstream=behind(), keys={"sk-mine": "local"}) as w:
                talk.append({"role": "user", "content": f"{turn} " + "é" * 400})
                sent.append(json.dumps({"messages": talk, "model": "gpt", "new_field": {"a": "b" * 300}}).encode())
                head = {"authorization": "Bearer sk-mine"}
                assert (await w.http.post("/v1/chat/completions", content=sent[-1], headers=head)).status_code == 200
                talk.append(reply["message"])
        assert [asked for _, asked in server.requests] == sent, "what the upstream gets is not shortened"
        async with world(tmp_path, None, None, upstream=behind(), keys={"sk-mine": "local"}) as w:
            assert [call["request"] for call in w.calls()] == sent
            calls = stored_calls(w)
            assert [call["request_kept"] for call in calls[1:]] == [
                {"messages": 2 * turn - 1, "new_field": -1} for turn in range(1, 6)
            ]
            assert len({event["trajectory"] for event in w.events()}) == 1


async def test_calls_at_once_each_say_what_they_leave_out(tmp_path: Path, renderer: TemplateRenderer) -> None:
    """Large ones are written down beside the loop, so that others of their session come between."""
    engine = ScriptedEngine(lambda *_: renderer.tokenizer.encode("Yes.<|im_end|>"))
    async with world(tmp_path, renderer, engine, max_model_len=1 << 17) as w:
        session = await w.start()
        shared = {"role": "user", "content": "x" * 4000}
        for turn in range(3):
            calls = [
                w.chat([shared, {"role": "user", "content": f"{turn} {n}"}], session["api_key"], metadata={"a": filled})
                for n, filled in enumerate(["y" * (400 << 10)] * 3 + ["z"] * MOST)
            ]
            assert {got.status_code for got in await asyncio.gather(*calls)} == {200}
        kept = w.calls()
        assert len(kept) == 3 * (3 + MOST)
        assert all(orjson.loads(call["request"])["messages"][0] == shared for call in kept)
        assert sum(call["request_base"] is not None for call in stored_calls(w)) > len(kept) // 2
    async with world(tmp_path, renderer, engine, max_model_len=1 << 17) as w:
        assert not w.gateway.sessions.unreadable
