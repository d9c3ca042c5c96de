"""A large call is written down beside the event loop, in its session's order: it delays nobody, and nothing of the log
differs from what the loop itself would have written."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from millrace.dialects import match_keys
from millrace.dialects.rendering.template import TemplateRenderer
from millrace.infra.engines.upstream import TextUpstream
from millrace.producers.gateway.sessions.recorder import DRAFT_BYTES, EventDraft
from millrace.schemas.chain import START, event_hash
from tests.support.fake_http import answer, serving
from tests.support.gateway_world import ScriptedEngine, World, world

WAIT_S = 60.0
USER = {"role": "user", "content": "hi"}
AGAIN = {"role": "user", "content": "and again"}
MUCH = {"metadata": {"a": "x" * DRAFT_BYTES}}


class Gate:
    """Holds every draft back until it is let; `threads` are those that wrote one."""

    def __init__(self) -> None:
        self.let = threading.Event()
        self.threads: list[str] = []


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    held, write = Gate(), EventDraft.write

    def late(self: EventDraft) -> None:
        held.threads.append(threading.current_thread().name)
        assert held.let.wait(WAIT_S), "nobody else was served"
        write(self)

    monkeypatch.setattr(EventDraft, "write", late)
    yield held
    held.let.set()


def make_engine(renderer: TemplateRenderer) -> ScriptedEngine:
    return ScriptedEngine(lambda *_: renderer.tokenizer.encode("The answer is 42.<|im_end|>"))


async def until(done: Any) -> None:
    async with asyncio.timeout(WAIT_S):
        while not done():
            await asyncio.sleep(0.01)


def check_chain(w: World, trajectory: str) -> None:
    """Steps are dense, and every link is what anyone makes of the whole event."""
    link = START
    for step, event in enumerate(w.events(trajectory)):
        stored = {name: value for name, value in event.items() if name != "data"}
        assert (event["step"], event["prev_hash"], event["hash"]) == (step, link, event_hash(link, stored))
        link = event["hash"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_everybody_is_served_while_a_large_call_is_written_down(
    tmp_path: Path, renderer: TemplateRenderer, gate: Gate, streamed: bool
) -> None:
    async with world(tmp_path, renderer, make_engine(renderer)) as w:
        session = await w.start()
        calling = asyncio.create_task(w.chat([USER], session["api_key"], stream=streamed, **MUCH))
        await until(lambda: gate.threads)
        assert (await w.chat([AGAIN])).status_code == 200
        assert not w.calls(session["session"]), "it is recorded once, when its draft is there"
        gate.let.set()
        got = await calling
        assert "42" in got.text
        (call,) = w.calls(session["session"])
        assert orjson.loads(call["request"])["metadata"] == MUCH["metadata"]
        assert gate.threads[0].startswith("aside")
        check_chain(w, session["session"])


async def test_a_call_that_is_overtaken_while_it_is_written_down_stands_where_it_then_belongs(
    tmp_path: Path, renderer: TemplateRenderer, gate: Gate
) -> None:
    async with world(tmp_path, renderer, make_engine(renderer)) as w:
        session = await w.start()
        first = (await w.chat([USER], session["api_key"])).json()["choices"][0]["message"]
        talk = [USER, first, AGAIN]
        calling = asyncio.create_task(w.chat(talk, session["api_key"], **MUCH))
        await until(lambda: gate.threads)
        assert (await w.chat(talk, session["api_key"])).status_code == 200
        gate.let.set()
        second = (await calling).json()["choices"][0]["message"]
        one, quick, slow = w.calls(session["session"])
        assert quick["lineage"] == one["lineage"]
        assert slow["lineage"] != one["lineage"]
        assert slow["opened"] == "another call went on from the same reply"
        check_chain(w, session["session"])
        assert (await w.chat([*talk, second, USER], session["api_key"])).status_code == 200
        live = w.calls(session["session"])
    async with world(tmp_path, renderer, make_engine(renderer)) as w:
        assert not w.gateway.sessions.unreadable, "a start folds what was folded"
        assert w.calls(session["session"]) == live


async def test_a_session_that_ends_while_a_call_is_written_down_holds_it(
    tmp_path: Path, renderer: TemplateRenderer, gate: Gate
) -> None:
    async with world(tmp_path, renderer, make_engine(renderer)) as w:
        session = await w.start()
        calling = asyncio.create_task(w.chat([USER], session["api_key"], **MUCH))
        await until(lambda: gate.threads)
        headers = {"authorization": f"Bearer {session['api_key']}"}
        ended = await w.http.post(f"/v1/sessions/{session['session']}/end", json={}, headers=headers)
        assert ended.status_code == 200
        assert (await calling).status_code == 503
        kinds = [event["kind"] for event in w.events(session["session"])]
        assert kinds == ["episode_started", "model_call", "episode_ended"]
        check_chain(w, session["session"])


async def test_what_cannot_be_drafted_is_told_by_the_record(
    tmp_path: Path, renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = EventDraft.__init__

    def odd(self: EventDraft, event: Any, body: Any) -> None:
        body["turn"] = "no number"
        make(self, event, body)

    monkeypatch.setattr(EventDraft, "__init__", odd)
    async with world(tmp_path, renderer, make_engine(renderer)) as w:
        session = await w.start()
        assert (await w.chat([USER], session["api_key"], **MUCH)).status_code == 200
        kinds = [event["kind"] for event in w.events(session["session"])]
        assert kinds == ["episode_started", "gap"]


async def test_an_upstreams_large_answer_is_read_and_written_down_beside_the_loop(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = {"role": "assistant", "content": "x" * DRAFT_BYTES}
    raw = orjson.dumps({"id": "chatcmpl-7", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})
    extend, threads = match_keys.extend, []

    def told(digest: bytes, given: Any) -> bytes:
        if len(given["content"]) >= DRAFT_BYTES:
            threads.append(threading.current_thread().name)
        return extend(digest, given)

    monkeypatch.setattr(match_keys, "extend", told)
    async with serving(answer(raw)) as server:
        upstream = TextUpstream(f"{server.url}/v1", "sk-upstream")
        async with world(tmp_path, None, None, upstream=upstream) as w:
            session = await w.start()
            calls = [asyncio.create_task(w.chat([USER], session["api_key"])) for _ in range(2)]
            await until(lambda: len(gate.threads) == 2)
            assert (await w.http.get("/health")).status_code == 200
            gate.let.set()
            assert [(await call).content for call in calls] == [raw, raw]
            assert [call["response"] for call in w.calls()] == [raw, raw]
            assert sorted(call["turn"] for call in w.calls()) == [0, 1]
            assert all(name.startswith("aside") for name in (*threads, *gate.threads))
            assert threads
            check_chain(w, session["session"])
        await upstream.close()
