"""A problem of capture never costs a reply, unless capture is required: then none is told that is not captured. Disks
that fail in every way, answers that no recorder understands, logs that hold what no fold takes."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from millrace.dialects.rendering.template import TemplateRenderer
from millrace.infra.engines.upstream import TextUpstream
from millrace.producers.capture.entry import encode
from millrace.producers.capture.log import PROBE, CaptureLog, LogFull
from millrace.producers.capture.segments import frame, segments
from millrace.producers.gateway.upstreams.routes import RouteRule
from millrace.producers.gateway.upstreams.upstreams import Upstream, Upstreams
from millrace.schemas import bounds, codec
from millrace.schemas.limits import beyond_body
from tests.support.fake_http import answer, serving, stream
from tests.support.gateway_world import ScriptedEngine, World, world
from tests.support.speakers import SPEAKERS, ChatSpeaker, Speaker
from tests.support.upstream_answers import EVENTS, WHOLE

USER = {"role": "user", "content": "hi"}
CHAT = "/v1/chat/completions"


def make_engine(renderer: TemplateRenderer) -> ScriptedEngine:
    return ScriptedEngine(lambda *_: renderer.tokenizer.encode("The answer is 42.<|im_end|>"))


class Disk:
    """A disk that fails on demand, after half of what it was given. `spared`: lengths that it takes all the same."""

    error: int | None = None
    spared: tuple[int, ...] = ()

    def write(self, descriptor: int, data: bytes) -> int:
        if self.error is not None and len(data) not in self.spared:
            os.write(descriptor, data[: len(data) // 2])
            raise OSError(self.error, os.strerror(self.error))
        return os.write(descriptor, data)


@pytest.mark.parametrize("error", [errno.EIO, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EBADF])
@pytest.mark.parametrize("streamed", [False, True])
async def test_no_error_of_the_disk_costs_a_reply(
    tmp_path: Path, renderer: TemplateRenderer, error: int, streamed: bool
) -> None:
    disk = Disk()
    async with world(tmp_path, renderer, make_engine(renderer), log_options={"write": disk.write}) as w:
        session = await w.start()
        disk.error = error
        for _ in range(2):
            got = await w.chat([USER], session["api_key"], stream=streamed)
            assert got.status_code == 200
            assert "42" in got.text
        assert (await w.http.post("/v1/sessions", json={})).status_code == 503
        assert (await w.http.get("/health")).status_code == 200
        disk.error = None
        assert (await w.chat([USER], session["api_key"])).status_code == 200
        kinds = [event["kind"] for event in w.events(session["session"])]
        assert kinds == ["episode_started", "gap", "model_call"]
    async with world(tmp_path, renderer, make_engine(renderer)) as w:
        assert session["session"] in w.gateway.sessions.live
        assert w.gateway.sessions.unreadable == set()


UNCAPTURED = "serves no call that it cannot capture"
both = pytest.mark.parametrize("streamed", [False, True], ids=["plain", "stream"])


@dataclass
class Asking:
    """A gateway before an engine, or an upstream, of one API."""

    w: World
    path: str
    body: dict[str, Any]
    behind: Callable[[], int]
    """how many calls who answers was asked"""

    async def call(self) -> httpx.Response:
        return await self.w.http.post(self.path, json=self.body)

    async def state(self) -> dict[str, Any]:
        return dict((await self.w.http.get("/health")).json())


@asynccontextmanager
async def asking(
    folder: Path,
    renderer: TemplateRenderer,
    kind: type[Speaker],
    disk: Disk,
    *,
    streamed: bool,
    far: bool = False,
    required: bool = True,
) -> AsyncIterator[Asking]:
    engine, name = make_engine(renderer), kind.name
    events = [b"data: " + json.dumps(said).encode() + b"\n\n" for said in EVENTS[name]]
    more: dict[str, Any] = {"required": required, "log_options": {"write": disk.write}}
    async with serving(stream(*events) if streamed else answer(json.dumps(WHOLE[name]).encode())) as server:
        client = TextUpstream(f"{server.url}/v1", "sk-upstream")
        rules = [RouteRule("far", "far")]
        upstreams = Upstreams([Upstream("far", client, frozenset({name}))], rules)
        async with world(folder, renderer, engine, upstream=upstreams, **more) as w:
            body = {**kind(w).body("hi"), "model": "far" if far else "m", "stream": streamed}
            yield Asking(w, kind.path, body, lambda: len(server.requests) if far else len(engine.asked))
        await client.close()


@pytest.mark.parametrize("kind", SPEAKERS, ids=lambda kind: kind.name)
@both
@pytest.mark.parametrize("far", [False, True], ids=["engine", "upstream"])
@pytest.mark.parametrize("required", [False, True], ids=["best-effort", "required"])
async def test_where_capture_is_required_nothing_is_told_that_is_not_captured(
    tmp_path: Path, renderer: TemplateRenderer, kind: type[Speaker], streamed: bool, far: bool, required: bool
) -> None:
    disk = Disk()
    async with asking(tmp_path, renderer, kind, disk, streamed=streamed, far=far, required=required) as a:
        log, durable, most = a.w.log, a.w.log.durable, a.w.log.max_waiting

        async def failing() -> None:
            raise OSError(errno.EIO, "Input/output error")

        for failure in ("full", "full in the meantime", "not synced", "behind"):
            good, calls, lost, asked = await a.call(), len(a.w.calls()), (await a.state())["lost"], a.behind()
            assert good.status_code == 200
            if failure == "behind":
                log.max_waiting = 0
            elif failure == "not synced":
                log.durable = failing  # type: ignore[method-assign]
            else:
                disk.error, disk.spared = errno.ENOSPC, (len(PROBE),) if failure == "full in the meantime" else ()
            got, late = await a.call(), failure in ("full in the meantime", "not synced")  # found out by writing alone
            health = await a.state()
            assert (health["lost"] != lost) is (late or not required)
            assert health["capture"] == ("required" if required else "best-effort")
            if not required:
                assert (got.status_code, a.behind(), health["status"]) == (200, asked + 1, "ok")
                assert UNCAPTURED not in got.text
            elif late and streamed:
                assert (got.status_code, a.behind()) == (200, asked + 1)
                assert UNCAPTURED in got.text.strip().split("\n\n")[-1]
                for end in ("[DONE]", "message_stop", "response.completed"):
                    assert end not in got.text
            else:
                assert (got.status_code, a.behind()) == (503, asked + late)
                assert got.headers["retry-after"] == "1"
                assert UNCAPTURED in got.text
            if required and failure != "full in the meantime":
                assert health["status"] == "capture down"
                assert ((await a.call()).status_code, a.behind()) == (503, asked + late)
            disk.error, log.durable, log.max_waiting = None, durable, most  # type: ignore[method-assign]
            assert (await a.state())["status"] == "ok"
            assert (len(a.w.calls()) > calls) is (failure == "not synced")


@both
async def test_a_call_that_is_not_served_begins_no_episode(
    tmp_path: Path, renderer: TemplateRenderer, streamed: bool
) -> None:
    disk = Disk()
    async with asking(tmp_path, renderer, ChatSpeaker, disk, streamed=streamed) as a:
        disk.error = errno.EROFS
        assert (await a.call()).status_code == 503
        assert (a.behind(), a.w.gateway.sessions.live, a.w.events()) == (0, {}, [])


async def test_a_disk_that_cannot_sync_costs_no_reply(tmp_path: Path, renderer: TemplateRenderer) -> None:
    async with world(tmp_path, renderer, make_engine(renderer), log_options={"fsync": True}) as w:
        session = await w.start()

        async def failing() -> None:
            raise OSError(errno.EIO, "Input/output error")

        w.log.durable = failing  # type: ignore[method-assign]
        assert (await w.chat([USER], session["api_key"])).status_code == 200
        assert [event["kind"] for event in w.events(session["session"])][-1] == "gap"


def test_a_write_that_could_not_be_cut_back_is_cut_back_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.producers.capture.test_log import entry

    disk = Disk()
    log = CaptureLog(tmp_path / "log", write=disk.write)
    log.append(entry(0))
    real = os.ftruncate

    def stuck(descriptor: int, length: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    disk.error = errno.EIO
    monkeypatch.setattr(os, "ftruncate", stuck)
    for _ in range(2):
        with pytest.raises(LogFull, match="Input/output"):
            log.append(entry(1, 100))
    disk.error = None
    with pytest.raises(LogFull, match="Input/output"):
        log.append(entry(1, 100))
    monkeypatch.setattr(os, "ftruncate", real)
    log.append(entry(1, 100))
    assert [kept.seq for kept in log.read()] == [0, 1]
    log.close()
    again = CaptureLog(tmp_path / "log")
    assert (again.end, again.torn) == (2, 0)
    again.close()


# ---------------------------------------------------------------------- answers of an upstream


@asynccontextmanager
async def before(folder: Path, *scripts: Any) -> AsyncIterator[World]:
    async with serving(*scripts) as server:
        upstream = TextUpstream(f"{server.url}/v1", "sk-upstream")
        async with world(folder, None, None, upstream=upstream) as w:
            try:
                yield w
            finally:
                await upstream.close()


def reply(**message: Any) -> dict[str, Any]:
    return {
        "id": "c-1",
        "choices": [{"index": 0, "message": {"role": "assistant", **message}, "finish_reason": "stop"}],
    }


CUSTOM = {"id": "c1", "type": "custom", "custom": {"name": "shell", "input": "ls"}}
UNDERSTOOD = {
    "parts": (
        reply(content=[{"type": "thinking", "thinking": []}, {"type": "text", "text": "Hello."}]),
        "Hello.",
        None,
    ),
    "custom tools": (reply(content=None, tool_calls=[CUSTOM]), "", ("shell", "ls")),
    "big numbers": (
        {**reply(content="Hello."), "usage": {"prompt_tokens": 2**70, "completion_tokens": -1}},
        "Hello.",
        None,
    ),
    "index null": ({"id": "c", "choices": [{"index": None, "message": {"content": "Hello."}}]}, "Hello.", None),
    "no finish": ({"id": 7, "choices": [{"message": {"content": "Hello."}}], "usage": "none"}, "Hello.", None),
}
LOST = {
    "no JSON": b"<html>",
    "a list": b"[]",
    "a number": b"1e400",
    "no choices": b'{"id": "x"}',
    "deep": b'{"a":' + b"[" * 3000 + b"]" * 3000 + b"}",
}


@pytest.mark.parametrize("name", UNDERSTOOD)
async def test_answers_in_other_shapes_pass_and_are_understood(tmp_path: Path, name: str) -> None:
    given, said, called = UNDERSTOOD[name]
    raw = json.dumps(given).encode()
    async with before(tmp_path, answer(raw)) as w:
        got = await w.http.post(CHAT, json={"messages": [USER]})
        assert (got.status_code, got.content) == (200, raw)
        (session,) = w.gateway.sessions.live.values()
        assert (session.newest_text or "") == said
        echo: dict[str, Any] = {"role": "assistant", "content": said}
        if called:
            call = {"id": "c1", "type": "function", "function": {"name": called[0], "arguments": called[1]}}
            echo["tool_calls"] = [call]
        await w.http.post(CHAT, json={"messages": [USER, echo, USER]})
        assert len({event["trajectory"] for event in w.events()}) == 1
        assert [event["kind"] for event in w.events()] == ["episode_started", "model_call", "model_call"]
    async with before(tmp_path, answer(raw)) as w:
        assert (len(w.gateway.sessions.live), w.gateway.sessions.unreadable) == (1, set())


@pytest.mark.parametrize("name", LOST)
async def test_answers_that_are_none_pass_and_leave_a_gap(tmp_path: Path, name: str) -> None:
    async with before(tmp_path, answer(LOST[name])) as w:
        got = await w.http.post(CHAT, json={"messages": [USER]})
        assert (got.status_code, got.content) == (200, LOST[name])
        assert [event["kind"] for event in w.events()] == ["episode_started", "gap"]


async def test_names_beyond_their_bound_are_left_out_of_the_record(tmp_path: Path) -> None:
    """Refine would refuse the whole call for one of them."""
    long = "x" * (bounds.NAME_BYTES + 1)
    raw = json.dumps({**reply(content="Hello."), "id": long}).replace('"stop"', f'"{long}"').encode()
    async with before(tmp_path, answer(raw)) as w:
        got = await w.http.post(CHAT, json={"messages": [USER], "stop": ["z"] * (bounds.NAMES + 1)})
        assert (got.status_code, got.content) == (200, raw)
        (call,) = w.calls()
        assert beyond_body("model_call", call) is None
        assert call["response"] == raw


def event(delta: Any, **more: Any) -> bytes:
    return b"data: " + json.dumps({"id": "c", "choices": [{"index": 0, "delta": delta, **more}]}).encode() + b"\n\n"


@pytest.mark.parametrize(
    "odd",
    [
        b"data: {broken\n\n",
        b'data: {"choices": 7}\n\n',
        event({"tool_calls": [{"index": None, "id": "c1", "function": {"name": "f", "arguments": "{}"}}]}),
        event({"tool_calls": [{"index": 10**9, "id": "c1", "function": {"name": "f", "arguments": "{}"}}]}),
        event({"tool_calls": [{"index": 0, "id": "c1", "type": "custom", "custom": {"name": "f", "input": "{}"}}]}),
        event({"content": [{"type": "text", "text": ""}]}),
        event(None),
        b": a comment\n\n",
    ],
)
async def test_odd_events_pass_and_the_rest_is_put_together(tmp_path: Path, odd: bytes) -> None:
    parts = [event({"role": "assistant", "content": "Hel"}), odd, event({"content": "lo"}, finish_reason="stop")]
    raw = b"".join([*parts, b"data: [DONE]\n\n"])
    async with before(tmp_path, stream(raw)) as w:
        got = await w.http.post(CHAT, json={"messages": [USER], "stream": True})
        assert (got.status_code, got.content) == (200, raw)
        (call,) = w.calls()
        message = json.loads(call["response"])["choices"][0]["message"]
        assert message["content"] == "Hello"
        if b"c1" in odd:
            assert [call["function"] for call in message["tool_calls"]] == [{"name": "f", "arguments": "{}"}]


async def test_calls_that_fail_begin_no_episode(tmp_path: Path) -> None:
    async with before(tmp_path, answer(b"no", 429)) as w:
        for streamed in (False, True):
            got = await w.http.post(CHAT, json={"messages": [USER], "stream": streamed})
            assert (got.status_code, got.content) == (429, b"no")
        assert (w.events(), w.gateway.sessions.live) == ([], {})


# ---------------------------------------------------------------------- logs that no fold takes


def rewritten(folder: Path, change: Any) -> None:
    """Every entry of a closed log anew, as `change` makes it."""
    log = CaptureLog(folder)
    entries = [kept.entry for kept in log.read()]
    log.close()
    (path,) = (segment.path for segment in segments(folder))
    path.write_bytes(b"".join(frame(change(at, entry)) for at, entry in enumerate(entries)))


def with_request(request: bytes) -> Any:
    def change(_: int, entry: Any) -> bytes:
        found = codec.decode_as("Event", entry.value)
        if found["kind"] == "model_call":
            body = {**codec.decode_body("model_call", found["body"]), "request": request}
            found["body"] = codec.encode_body("model_call", body)
        return encode(type(entry)(entry.key, entry.headers, codec.encode("Event", found)))

    return change


@pytest.mark.parametrize(
    "change",
    [
        with_request(b"{}"),
        with_request(b"[" * 5000),
        with_request(b'{"messages": [{"role": "user", "content": 7}]}'),
        lambda at, entry: (
            encode(type(entry)(entry.key, entry.headers, b"\xc3\x01 no event")) if at == 1 else encode(entry)
        ),
        lambda at, entry: b"no entry" if at == 1 else encode(entry),
    ],
    ids=["no messages", "deep", "wrong types", "no event", "no entry"],
)
async def test_it_starts_whatever_its_log_holds(tmp_path: Path, renderer: TemplateRenderer, change: Any) -> None:
    async with world(tmp_path, renderer, make_engine(renderer)) as w:
        odd, sound = await w.start(), await w.start()
        for session in (odd, odd, sound):
            await w.chat([USER], session["api_key"])
    rewritten(tmp_path / "capture", lambda at, entry: change(at, entry) if mine(entry, odd) else encode(entry))
    async with world(tmp_path, renderer, make_engine(renderer)) as w:
        assert sound["session"] in w.gateway.sessions.live
        assert (await w.chat([USER], sound["api_key"])).status_code == 200
        health = (await w.http.get("/health")).json()
        assert health["unreadable"] == len(w.gateway.sessions.unreadable)


def mine(entry: Any, session: dict[str, str]) -> bool:
    return bool(entry.headers["trajectory"] == session["session"])


async def test_a_session_whose_calls_cannot_be_folded_goes_on_in_a_new_lineage(
    tmp_path: Path, renderer: TemplateRenderer
) -> None:
    async with world(tmp_path, renderer, make_engine(renderer)) as w:
        session = await w.start()
        reply = (await w.chat([USER], session["api_key"])).json()["choices"][0]["message"]
    rewritten(tmp_path / "capture", with_request(b"{}"))
    async with world(tmp_path, renderer, make_engine(renderer)) as w:
        assert w.gateway.sessions.unreadable == {session["session"]}
        assert (await w.chat([USER, reply, USER], session["api_key"])).status_code == 200
        first, second = w.events(session["session"])[1:]
        assert (second["prev_hash"], second["step"]) == (first["hash"], 2)
        assert second["data"]["opened"] == "it is the first call"
        await w.http.post(f"/v1/sessions/{session['session']}/end", json={})
        assert w.events(session["session"])[-1]["kind"] == "episode_ended"
