"""A long request delays nobody: it is read and tokenized beside the event loop, or refused before."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from millrace.dialects.rendering.base import NO_OPTIONS, Message, Options, RenderError, Tools
from millrace.dialects.rendering.template import TemplateRenderer
from millrace.dialects.rendering.tokenizer import ChatTokenizer
from millrace.infra.process.offload import HEAVY
from millrace.producers.gateway.calls.engine_calls import EngineCalls
from tests.support import chat_tokenizer
from tests.support.gateway_world import ScriptedEngine, world

WAIT_S = 60.0
LONG = {"role": "user", "content": "a long question " * (HEAVY // 8)}
SHORT = {"role": "user", "content": "Hi"}


class Slow(TemplateRenderer):
    """Renders long conversations only when it is let."""

    def __init__(self, folder: Path) -> None:
        super().__init__(ChatTokenizer(chat_tokenizer.write(folder)))
        self.let = threading.Event()
        self.threads: list[str] = []

    def render(self, messages: Sequence[Message], tools: Tools, options: Options = NO_OPTIONS) -> list[int]:
        self.threads.append(threading.current_thread().name)
        if any(len(message["content"]) > HEAVY for message in messages):
            assert self.let.wait(WAIT_S), "nobody else was served"
        if messages[-1]["content"] == "refuse":
            raise RenderError("not this one")
        return super().render(messages, tools, options)


def make_engine(renderer: TemplateRenderer) -> ScriptedEngine:
    return ScriptedEngine(lambda *_: renderer.tokenizer.encode("The answer is 42.<|im_end|>"))


async def until(done: Any) -> None:
    async with asyncio.timeout(WAIT_S):
        while not done():
            await asyncio.sleep(0.01)


async def test_everybody_is_served_while_a_long_prompt_is_made(tmp_path: Path):
    renderer = Slow(tmp_path / "model")
    async with world(tmp_path, renderer, make_engine(renderer), max_model_len=1 << 20) as w:
        calling = asyncio.create_task(w.chat([LONG]))
        await until(lambda: renderer.threads)
        assert (await w.http.get("/health")).status_code == 200
        assert (await w.chat([SHORT])).status_code == 200
        renderer.let.set()
        assert (await calling).status_code == 200
        assert renderer.threads[0].startswith("aside")
        assert [asked.prompt for asked in w.engine.asked] == [
            renderer.render([messages], None) for messages in (SHORT, LONG)
        ]


async def test_a_call_that_leaves_while_its_prompt_is_made_leaves_no_trace(tmp_path: Path):
    renderer = Slow(tmp_path / "model")
    async with world(tmp_path, renderer, make_engine(renderer), max_model_len=1 << 20) as w:
        session = w.gateway.sessions.live[(await w.start())["session"]]
        key = w.gateway.sessions.key_of(session)
        body = b'{"model": "m", "messages": [{"role": "user", "content": "%s"}]}' % LONG["content"].encode()
        headers = {"authorization": f"Bearer {key}"}
        calling = asyncio.create_task(
            EngineCalls(w.gateway).prepare(w.gateway.callers.identify(headers), headers, body)
        )
        await until(lambda: renderer.threads)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        renderer.let.set()
        assert (await w.chat([LONG], key)).status_code == 200
        (call,) = w.calls()
        assert (call["supersedes"], call["opened"]) == (None, "it is the first call")


async def test_two_long_first_calls_of_one_name_are_one_episode(tmp_path: Path):
    renderer = Slow(tmp_path / "model")
    async with world(tmp_path, renderer, make_engine(renderer), max_model_len=1 << 20) as w:
        body, headers = {"model": "m", "messages": [LONG]}, {"x-millrace-session": "case"}
        calls = [asyncio.create_task(w.http.post("/v1/chat/completions", json=body, headers=headers, timeout=WAIT_S))
                 for _ in range(2)]  # fmt: skip
        await until(lambda: len(renderer.threads) == 2)
        renderer.let.set()
        assert [(await call).status_code for call in calls] == [200, 200]
        assert len({event["trajectory"] for event in w.events()}) == 1


async def test_a_call_that_fails_meanwhile_does_not_end_the_episode_that_a_long_prompt_begins(tmp_path: Path):
    renderer = Slow(tmp_path / "model")
    async with world(tmp_path, renderer, make_engine(renderer), max_model_len=1 << 20) as w:
        headers = {"x-millrace-session": "case"}

        async def post(*messages: dict[str, str]) -> int:
            body = {"model": "m", "messages": messages}
            return (await w.http.post("/v1/chat/completions", json=body, headers=headers, timeout=WAIT_S)).status_code

        calling = asyncio.create_task(post(LONG))
        await until(lambda: renderer.threads)
        assert await post({"role": "user", "content": "refuse"}) == 400
        assert await post(SHORT) == 200
        renderer.let.set()
        assert await calling == 200
        assert len({event["trajectory"] for event in w.events()}) == 1


async def test_what_cannot_fit_is_refused_before_it_is_tokenized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    renderer = TemplateRenderer(ChatTokenizer(chat_tokenizer.write(tmp_path / "model")))
    async with world(tmp_path, renderer, make_engine(renderer), max_model_len=64) as w:
        assert (await w.chat([SHORT])).status_code == 200
        monkeypatch.setattr(renderer.tokenizer.segments, "_fresh", lambda pieces: pytest.fail("it was tokenized"))
        answer = await w.chat([{"role": "user", "content": "x" * (1 << 20)}])
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert len(w.engine.asked) == 1
