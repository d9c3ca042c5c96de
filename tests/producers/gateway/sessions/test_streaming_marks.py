"""Marks of replies under way: what a process that is killed leaves is labelled by the next one, once, and nothing else
is. A copy of the capture folder at an instant is what a kill at that instant leaves."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.dialects.rendering.template import TemplateRenderer
from millrace.infra.engines.upstream import TextUpstream
from millrace.producers.gateway.sessions.recorder import CUT_OFF
from millrace.producers.gateway.sessions.streaming_marks import REPLY, StreamingMarks
from tests.support.fake_http import serving
from tests.support.gateway_world import ScriptedEngine, World, world

WAIT_S = 120.0
PART = b'data: {"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"Hel"}}]}\n\n'
LAST = b'data: {"id":"c","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'


@given(st.lists(st.tuples(st.sampled_from(["begin", "record", "kill"]), st.integers(0, 5)), max_size=40))
@settings(max_examples=60)
def test_what_was_begun_and_not_recorded_is_left(tmp_path_factory: pytest.TempPathFactory, steps: Any) -> None:
    """Whatever happens, and however often the process is killed, also where the file is written anew all the time."""
    folder = tmp_path_factory.mktemp("marks")
    marks, under, recorded = StreamingMarks(folder, most_bytes=30), dict[str, str](), list[dict[str, str]]()
    for step, number in steps:
        name = f"r{number}"
        if step == "begin" and name not in under:
            marks.begin(name, f"t{number}")
            under[name] = f"t{number}"
            recorded = [header for header in recorded if header[REPLY] != name]  # each call has a name of its own
        elif step == "record" and name in under:
            if header := marks.note(name):
                recorded.append(header)
                marks.settle(name)
                del under[name]
        elif step == "kill":
            marks.close()
            marks = StreamingMarks(folder, most_bytes=30)
            for header in recorded:
                marks.fold(header)
            assert marks.left == under
            for left in list(marks.left):
                recorded.append({REPLY: left})
                marks.settle(left)
            under.clear()
    marks.close()


def test_a_mark_that_was_not_written_whole_is_none(tmp_path: Path) -> None:
    marks = StreamingMarks(tmp_path)
    marks.begin("one", "t1")
    marks.begin("two", "t2")
    marks.close()
    path = tmp_path / "underway"
    path.write_bytes(path.read_bytes()[:-2])
    again = StreamingMarks(tmp_path)
    assert again.left == {"one": "t1"}
    again.begin("three", "t3")
    again.close()
    assert StreamingMarks(tmp_path).left == {"one": "t1", "three": "t3"}, (
        "and nothing is written behind a part of a line"
    )


def test_the_file_stays_small(tmp_path: Path) -> None:
    marks = StreamingMarks(tmp_path, most_bytes=1000)
    for number in range(500):
        marks.begin(f"r{number}", "t")
        if number >= 3:
            marks.settle(f"r{number - 3}")
        assert (tmp_path / "underway").stat().st_size <= 1000
    marks.close()
    assert {"r497", "r498", "r499"} <= set(StreamingMarks(tmp_path).left)


def test_a_disk_that_takes_no_marks_costs_no_reply(tmp_path: Path) -> None:
    marks = StreamingMarks(tmp_path / "gone")
    marks.begin("one", "t")
    assert marks.note("one") == {REPLY: "one"}


@asynccontextmanager
async def told_in_part(
    folder: Path, renderer: TemplateRenderer, *, upstream: bool
) -> AsyncIterator[tuple[World, asyncio.Task[str], asyncio.Event]]:
    """A gateway in the middle of a streamed reply of which the client has a part; the event lets it end."""
    end = asyncio.Event()
    if upstream:
        async with (
            serving(lambda writer: _held(writer, end)) as far,
            world(folder, None, None, upstream=TextUpstream(f"{far.url}/v1")) as w,
            _reading(w) as task,
        ):
            yield w, task, end
        return
    engine = ScriptedEngine(lambda *_: renderer.tokenizer.encode("The answer is 42.<|im_end|>"))
    engine.gate = asyncio.Semaphore(3)

    async def open_gate() -> None:
        await end.wait()
        for _ in range(100):
            engine.gate.release()

    opening = asyncio.create_task(open_gate())
    async with world(folder, renderer, engine) as w, _reading(w) as task:
        yield w, task, end
    opening.cancel()


async def _held(writer: asyncio.StreamWriter, end: asyncio.Event) -> None:
    head = b"HTTP/1.1 200 X\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    writer.write(head + b"%x\r\n" % len(PART) + PART + b"\r\n")
    await writer.drain()
    await end.wait()
    writer.write(b"%x\r\n" % len(LAST) + LAST + b"\r\n0\r\n\r\n")


@asynccontextmanager
async def _reading(w: World) -> AsyncIterator[asyncio.Task[str]]:
    """A client that has the first part of its reply; its task gives the whole."""
    begun = asyncio.Event()

    async def read() -> str:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        async with w.http.stream("POST", "/v1/chat/completions", json=body, timeout=WAIT_S) as answer:
            text = ""
            async for part in answer.aiter_text():
                text += part
                begun.set()
            return text

    task = asyncio.create_task(read())
    async with asyncio.timeout(WAIT_S):
        await begun.wait()
    yield task
    async with asyncio.timeout(WAIT_S):
        await asyncio.wait([task])


def killed_now(folder: Path, name: str) -> Path:
    """What would be left of a gateway that is killed at this instant."""
    return Path(shutil.copytree(folder, folder.with_name(name)))


async def kinds(folder: Path, renderer: TemplateRenderer) -> list[str]:
    """What the log holds after a start."""
    async with world(folder, renderer, ScriptedEngine(lambda *_: [1])) as w:
        events = w.events()
        gaps = [event["data"] for event in events if event["kind"] == "gap"]
        assert [gap["reason"] for gap in gaps] == [CUT_OFF] * len(gaps)
        assert all(session.is_whole != bool(gaps) for session in w.gateway.sessions.live.values())
        assert [event["step"] for event in events] == list(range(len(events)))
        return [event["kind"] for event in events]


@pytest.mark.parametrize("upstream", [False, True])
async def test_a_reply_cut_by_a_kill_is_labelled_once(
    tmp_path: Path, renderer: TemplateRenderer, upstream: bool
) -> None:
    async with told_in_part(tmp_path / "own", renderer, upstream=upstream) as (_, reading, end):
        cut = killed_now(tmp_path / "own", "cut")
        end.set()
        assert "[DONE]" in await reading
        whole = killed_now(tmp_path / "own", "whole")
    ended = ["episode_started", "model_call"]
    assert await kinds(tmp_path / "own", renderer) == ended, "an orderly end leaves nothing to label"
    assert await kinds(whole, renderer) == ended, "nor does a kill behind the record"
    for again in range(2):
        assert await kinds(cut, renderer) == ["episode_started", "gap"], again
    assert await kinds(killed_now(cut, "again"), renderer) == ["episode_started", "gap"]


async def test_a_client_that_left_is_recorded_and_not_labelled(tmp_path: Path, renderer: TemplateRenderer) -> None:
    async with told_in_part(tmp_path / "own", renderer, upstream=False) as (w, reading, end):
        reading.cancel()
        async with asyncio.timeout(WAIT_S):
            while not w.calls():
                await asyncio.sleep(0.01)
        end.set()
        left = killed_now(tmp_path / "own", "left")
        assert [call["finish_reason"] for call in w.calls()] == ["abort"]
    assert await kinds(left, renderer) == ["episode_started", "model_call"]


async def test_a_mark_whose_episode_never_began_leaves_nothing(tmp_path: Path, renderer: TemplateRenderer) -> None:
    """A kill between the mark and the first event: the client was told nothing."""
    capture = tmp_path / "own" / "capture"
    capture.mkdir(parents=True)
    marks = StreamingMarks(capture)
    marks.begin("one", "t1")
    marks.close()
    assert StreamingMarks(capture).left == {"one": "t1"}
    assert await kinds(tmp_path / "own", renderer) == []
