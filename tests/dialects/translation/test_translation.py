"""A call in one API is answered by an upstream of another as if that spoke the client's: the same words plain and
streamed, tools there and back, refusals with their status, and one conversation in the log."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from millrace.dialects.all import by_name, read
from millrace.dialects.errors import ApiError
from millrace.dialects.reading.events import NO_WORDS
from millrace.dialects.rendering.template import TemplateRenderer
from millrace.dialects.translation.all import TRANSLATORS
from millrace.infra.engines.base import Sampling
from millrace.infra.engines.upstream import UNTRAINABLE, TextUpstream
from millrace.producers.gateway.upstreams.routes import RouteRule
from millrace.producers.gateway.upstreams.upstreams import Upstream, Upstreams
from millrace.schemas.arrays import unpack
from tests.support.fake_http import Script, answer, serving, stream
from tests.support.gateway_world import ScriptedEngine, World, world
from tests.support.speakers import SPEAKERS, Results, Speaker
from tests.support.upstream_answers import EVENTS

CALLS = (
    'Both.\n<tool_call>\n{"name": "add", "arguments": {"a": 1.0, "b": "Zürich"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "lookup", "arguments": {}}\n</tool_call>'
)
REPLIES = {
    "text": "The answer is 42.",
    "nothing": "",
    "spaces": "\n a \n\n b ",
    "calls": CALLS,
    "thoughts": "<think>\nhm\n</think>\n\nZürich 🙂",
}
NAMES = [one.name for one in TRANSLATORS]
CLIENTS = {kind.name: kind for kind in SPEAKERS if kind.name in NAMES}
PAIRS = [(client, server) for client in NAMES for server in NAMES if client != server]
pairs = pytest.mark.parametrize(("client", "server"), PAIRS)
both = pytest.mark.parametrize("streamed", [False, True], ids=["plain", "stream"])


@asynccontextmanager
async def far_away(folder: Path, renderer: TemplateRenderer, reply: str) -> AsyncIterator[World]:
    """A whole gateway, which says `reply`."""

    def script(prompt: list[int], sampling: Sampling, choice: int) -> Sequence[int]:
        return renderer.tokenizer.encode(reply + "<|im_end|>")

    async with world(folder, renderer, ScriptedEngine(script)) as far:
        yield far


@asynccontextmanager
async def near(folder: Path, url: str, speaks: str, **more: Any) -> AsyncIterator[World]:
    """A gateway whose only upstream speaks only one API."""
    upstream = Upstream("far", TextUpstream(url, "sk-far"), frozenset({speaks}), more.pop("retries", 0))
    routed = Upstreams([upstream], [RouteRule("m", "far")], first_s=0.0)
    async with world(folder, None, None, upstream=routed, **more) as w:
        try:
            yield w
        finally:
            await routed.close()


@pairs
@both
@pytest.mark.parametrize("reply", REPLIES)
async def test_a_conversation_is_what_it_would_be_in_the_upstream_s_own_api(
    tmp_path: Path, renderer: TemplateRenderer, client: str, server: str, streamed: bool, reply: str
) -> None:
    tools = ("add", "lookup") if reply == "calls" else ()
    async with (
        far_away(tmp_path / "far", renderer, REPLIES[reply]) as far,
        near(tmp_path / "near", f"{far.url}/v1", server) as w,
    ):
        session = await w.start()
        here, there = CLIENTS[client](w, session["api_key"]), CLIENTS[server](far)
        talk: list[Any] = ["hi"]
        said = await here.say(talk, stream=streamed, tools=tools, system="be brief")
        talk += [said, Results({id: f"{name} is done" for id, name, _ in said.calls}) if said.calls else "and?"]
        again = await here.say(talk, stream=streamed, tools=tools, system="be brief")
        assert again.text == said.text
        direct = await there.say(talk[:1], stream=streamed, tools=tools, system="be brief")
        assert (said.text, said.end, said.tokens) == (direct.text, direct.end, direct.tokens)
        assert [call[1:] for call in said.calls] == [call[1:] for call in direct.calls]
        assert said.thoughts == ("" if server == "messages" else direct.thoughts)  # it is not asked to show them

        first, second, own = far.calls()
        assert messages(first) == messages(own)
        assert unpack(first["prompt_ids"]).tolist() == unpack(own["prompt_ids"]).tolist()
        silent = reply == "nothing" and server == "messages"  # which takes no turn that says nothing
        if reply != "thoughts" and not silent:  # those of former turns are not sent
            whole = [*unpack(first["prompt_ids"]), *unpack(first["output_ids"])]
            assert (second["lineage"], second["prefix_len"]) == (first["lineage"], len(whole))
        kept = w.calls(session["session"])
        assert [call["response_id"] for call in kept] == [said.id, again.id]
        assert [call["turn"] for call in kept] == [0, 1]
        for call in kept:
            assert (call["trainable"], call["untrainable_reason"], call["engine"]) == (False, UNTRAINABLE, "far")
            assert call["usage"]["completion"] > 0
            assert read(call["request"], call["response"]).replies[0]["content"] in (said.text, None)
            assert by_name(client).wrote(orjson.loads(call["response"]))
        live = set(w.gateway.sessions.live)
    async with near(tmp_path / "near", "http://127.0.0.1:9/v1", server) as w:
        assert (set(w.gateway.sessions.live), w.gateway.sessions.unreadable) == (live, set())


def messages(call: Any) -> Any:
    """What a recorded call was asked."""
    return read(call["request"], call["response"]).messages


async def answered(folder: Path, script: Script, client: str, server: str, **more: Any) -> tuple[World, Any, Any]:
    """A call of the smallest request, where the upstream answers with `script`."""
    async with serving(script) as far, near(folder, far.url, server) as w:
        speaker: Speaker = CLIENTS[client](w)
        got = await w.http.post(speaker.path, json={**speaker.body("hi"), **more})
        return w, got, far.requests


@pairs
@both
async def test_a_refusal_keeps_its_status_and_its_words(
    tmp_path: Path, client: str, server: str, streamed: bool
) -> None:
    said = {"type": "error", "error": {"type": "rate_limit_error", "message": "slow down"}}
    script = answer(orjson.dumps(said), 429)
    w, got, requests = await answered(tmp_path, script, client, server, stream=streamed)
    assert (got.status_code, got.json()["error"]["message"]) == (429, "slow down")
    assert ("type" in got.json()) == (client == "messages")
    assert got.headers["content-type"] == "application/json"
    assert len(requests) == 1
    assert not w.calls()


@pairs
@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"error":"x"}', b"{", b"[" * 100, b"null"])
async def test_an_answer_that_is_none_is_an_error_and_a_gap(
    tmp_path: Path, client: str, server: str, body: bytes
) -> None:
    w, got, _ = await answered(tmp_path, answer(body), client, server)
    told = "x" if b"error" in body else "The engine does not answer, or broke off: try again"
    assert (got.status_code, got.json()["error"]["message"]) == (502, told)
    assert [event["kind"] for event in w.events()] == ["episode_started", "gap"]  # it was made, and is paid for


@pairs
@pytest.mark.parametrize(
    "events",
    [
        b"",
        b"data: ?\n\n",
        b'data: {"choices": [{"delta": {"content": "so"}}]}\n\n',
        b'event: error\ndata: {"type": "error", "message": "x", "error": {"message": "overloaded"}}\n\n',
    ],
    ids=["nothing", "no JSON", "no end", "an error"],
)
@pytest.mark.parametrize("then", ["end", "cut"])
async def test_a_stream_that_does_not_come_to_its_end_breaks_off(
    tmp_path: Path, client: str, server: str, events: bytes, then: str
) -> None:
    parts = [events] if events else []
    w, got, _ = await answered(tmp_path, stream(*parts, then=then), client, server, stream=True)
    last = [line for line in got.content.split(b"\n") if line.startswith(b"data: ")][-1]
    assert got.status_code == 200
    assert "error" in orjson.loads(last.removeprefix(b"data: "))
    (call,) = w.calls()
    assert call["finish_reason"] == "abort"


@pytest.mark.parametrize(("client", "server"), [*PAIRS, *zip(NAMES, NAMES, strict=True)])
@pytest.mark.parametrize("said", [{"message": "overloaded"}, "overloaded", {"code": 7}], ids=["usual", "text", "none"])
async def test_an_error_in_the_middle_reaches_the_client_in_its_words(
    tmp_path: Path, client: str, server: str, said: Any, caplog: pytest.LogCaptureFixture
) -> None:
    begun = [b"data: " + orjson.dumps(event) + b"\n\n" for event in EVENTS[server][:1]]
    error = b"data: " + orjson.dumps({"type": "error", "error": said}) + b"\n\n"
    if said == {"message": "overloaded"}:
        error = by_name(server).failure_event(ApiError(529, "overloaded")).sse()
    words = NO_WORDS if said == {"code": 7} else "overloaded"
    async with serving(stream(*begun, error)) as far, near(tmp_path, far.url, server) as w:
        speaker = CLIENTS[client](w)
        got = await w.http.post(speaker.path, json={**speaker.body("hi"), "stream": True})
        (call,) = w.calls()
        assert call["finish_reason"] == "abort"
        assert words in caplog.text
        if client == server:
            assert got.content == b"".join([*begun, error])
        else:
            assert orjson.loads(got.content.rpartition(b"data: ")[2])["error"]["message"] == words
        if client != server or said == {"message": "overloaded"}:
            with pytest.raises(speaker.failed, match=words):
                await speaker.say(["hi"], stream=True)


async def test_a_response_that_failed_is_an_error(tmp_path: Path) -> None:
    failed = {"id": "r", "object": "response", "status": "failed", "output": [], "error": {"message": "overloaded"}}
    w, got, _ = await answered(tmp_path, answer(orjson.dumps(failed)), "chat", "responses")
    assert (got.status_code, got.json()["error"]["message"]) == (502, "overloaded")
    assert not w.calls()


def events_of(*events: Any) -> Script:
    return stream(*(b"data: " + orjson.dumps(event) + b"\n\n" for event in events), b"data: [DONE]\n\n")


def delta(**said: Any) -> dict[str, Any]:
    return {"id": "far-1", "choices": [{"index": 0, "delta": said}]}


async def test_parts_and_calls_that_nothing_ends_are_heard_to_the_end_of_the_stream(tmp_path: Path) -> None:
    parts = [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, {"type": "text", "text": "so"}]
    call = {"index": 0, "id": "c", "function": {"name": "now"}}
    script = events_of(delta(content=parts), delta(tool_calls=[call]))
    w, got, _ = await answered(tmp_path, script, "messages", "chat", stream=True, thinking={"type": "adaptive"})
    assert got.status_code == 200
    (kept,) = w.calls()
    content = orjson.loads(kept["response"])["content"]
    assert [(block["type"], block.get("text") or block.get("input")) for block in content] == [
        ("thinking", None),
        ("text", "so"),
        ("tool_use", {}),
    ]


@pytest.mark.parametrize("asks", [True, False])
async def test_what_the_upstream_counted_is_recorded_whether_the_client_asks_for_it(tmp_path: Path, asks: bool) -> None:
    script = stream(
        *(
            f"data: {orjson.dumps(event).decode()}\n\n".encode()
            for event in (
                {"type": "message_start", "message": {"type": "message", "id": "m1", "usage": {"input_tokens": 70}}},
                {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": "ok"}},
                {"type": "message_delta", "delta": {"stop_reason": "refusal"}, "usage": {"output_tokens": 9000}},
                {"type": "message_stop"},
            )
        )
    )
    options = {"stream_options": {"include_usage": True}} if asks else {}
    w, got, _ = await answered(tmp_path, script, "chat", "messages", stream=True, **options)
    (kept,) = w.calls()
    assert (kept["usage"]["prompt"], kept["usage"]["completion"]) == (70, 9000)
    assert (kept["finish_reason"], kept["response_id"]) == ("content_filter", "chatcmpl-m1")
    ids = {orjson.loads(line[6:])["id"] for line in got.content.split(b"\n") if line.startswith(b"data: {")}
    assert ids == {"chatcmpl-m1"}


async def test_tools_among_which_the_reply_must_choose_are_the_only_ones_offered(tmp_path: Path) -> None:
    tools = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in ("a", "b", "c")]
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": n} for n in "ab"]}
    for server in ("chat", "messages"):
        more = {"tools": tools, "tool_choice": allowed}
        _, _, ((_, sent),) = await answered(tmp_path / server, answer(b"{}", 400), "responses", server, **more)
        asked = orjson.loads(sent)
        assert [tool.get("name") or tool["function"]["name"] for tool in asked["tools"]] == ["a", "b"]
        assert asked["tool_choice"] in ("required", {"type": "any"})


async def test_a_fallback_without_words_hides_no_refusal_and_is_passed_over(
    tmp_path: Path, renderer: TemplateRenderer
) -> None:
    async with far_away(tmp_path / "far", renderer, "ok") as far, serving(answer(b'{"error":"busy"}', 503)) as busy:
        for first, urls, status in (
            ("chat", (busy.url, f"{far.url}/v1"), 503),
            ("messages", (f"{far.url}/v1", f"{far.url}/v1"), 200),
        ):
            second = "messages" if first == "chat" else "chat"
            one = Upstream("one", TextUpstream(urls[0]), frozenset({first}), 0, "two")
            two = Upstream("two", TextUpstream(urls[1]), frozenset({second}))
            routed = Upstreams([one, two], [RouteRule("m", "one")], first_s=0.0)
            async with world(tmp_path / first, None, None, upstream=routed) as w:
                body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "n": 2}
                got = await w.http.post("/v1/chat/completions", json=body)
                assert got.status_code == status, got.text
            await routed.close()


UNSAID: dict[tuple[str, str], dict[str, Any]] = {
    ("chat", "messages"): {
        "n": 2, "logprobs": True, "presence_penalty": 0.5, "frequency_penalty": 0.5, "min_p": 0.1,
        "repetition_penalty": 1.1, "logit_bias": {"5": 1.0}, "response_format": {"type": "json_object"},
    },
    ("chat", "responses"): {
        "n": 2, "logprobs": True, "presence_penalty": 0.5, "stop": ["x"], "top_k": 5, "logit_bias": {"5": 1.0},
    },
    ("responses", "messages"): {"text": {"format": {"type": "json_object"}}},
    ("messages", "responses"): {"stop_sequences": ["x"], "top_k": 5},
}  # fmt: skip


@pytest.mark.parametrize(
    ("client", "server", "field"), [(*pair, field) for pair, fields in UNSAID.items() for field in fields]
)
async def test_what_the_upstream_s_api_has_no_words_for_is_refused(
    tmp_path: Path, client: str, server: str, field: str
) -> None:
    more = {field: UNSAID[client, server][field]}
    w, got, requests = await answered(tmp_path, answer(b"{}"), client, server, **more)
    assert got.status_code == 400
    said = got.json()["error"]["message"]
    assert "which has nothing like it" in said
    assert field.partition("_sequences")[0] in said
    assert not requests
    assert not w.calls()


IMAGE = "data:image/png;base64,iVBORw0KGgo="
PDF, NOTE = "data:application/pdf;base64,JVBERi0=", "data:text/plain;base64,WsO8cmljaA=="
FAR = "https://far.test/a.pdf"
SOUND = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
MEDIA: dict[str, dict[str, Any]] = {
    "a document": {
        "chat": {"type": "file", "file": {"filename": "a.pdf", "file_data": PDF}},
        "responses": {"type": "input_file", "filename": "a.pdf", "file_data": PDF},
        "messages": {
            "type": "document",
            "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="},
            "title": "a.pdf",
        },
    },
    "a text": {
        "chat": {"type": "file", "file": {"filename": "a.txt", "file_data": NOTE}},
        "responses": {"type": "input_file", "filename": "a.txt", "file_data": NOTE},
        "messages": {
            "type": "document",
            "source": {"type": "text", "media_type": "text/plain", "data": "Zürich"},
            "title": "a.txt",
        },
    },
    "a document elsewhere": {
        "responses": {"type": "input_file", "file_url": FAR},
        "messages": {"type": "document", "source": {"type": "url", "url": FAR}},
    },
    "a sheet": {
        "chat": {"type": "file", "file": {"filename": "a.csv", "file_data": NOTE.replace("plain", "csv")}},
        "responses": {"type": "input_file", "filename": "a.csv", "file_data": NOTE.replace("plain", "csv")},
    },
    "sound": {"chat": SOUND, "responses": SOUND},
}
"""the same in the words of each API that has any"""
IMAGES: dict[str, Any] = {
    "chat": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": IMAGE}}]}]},
    "responses": {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": IMAGE}]}]},
    "messages": {
        "messages": [
            {
                "role": "user",
                "content": [
                    {
                        "type": "image",
                        "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="},
                    }
                ],
            }
        ]
    },
}


@pairs
async def test_an_image_passes_and_what_nobody_knows_is_refused(tmp_path: Path, client: str, server: str) -> None:
    _, _, ((_, sent),) = await answered(tmp_path / "image", answer(b"{}", 400), client, server, **IMAGES[client])
    asked, expected = orjson.loads(sent), IMAGES[server]
    (field,) = expected
    assert asked[field][-1]["content"] == expected[field][-1]["content"]
    odd = orjson.loads(orjson.dumps(IMAGES[client]).replace(b'"image', b'"film').replace(b'"input_image', b'"film'))
    w, got, requests = await answered(tmp_path / "film", answer(b"{}"), client, server, **odd)
    assert (got.status_code, requests) == (400, [])
    assert not w.calls()


def saying(api: str, part: dict[str, Any]) -> dict[str, Any]:
    """A request of a user who sends one part."""
    return {"input" if api == "responses" else "messages": [{"role": "user", "content": [part]}]}


@pytest.mark.parametrize(
    ("client", "server", "what"),
    [(client, server, what) for client, server in PAIRS for what, said in MEDIA.items() if client in said],
)
async def test_files_and_sound_pass_where_the_other_api_has_words_for_them(
    tmp_path: Path, client: str, server: str, what: str
) -> None:
    said = MEDIA[what]
    w, got, requests = await answered(tmp_path, answer(b"{}", 400), client, server, **saying(client, said[client]))
    if server in said:
        ((_, sent),) = requests
        (field,) = saying(server, {})
        assert orjson.loads(sent)[field][-1]["content"] == [said[server]]
    else:
        assert (got.status_code, requests) == (400, [])
        assert "cannot be passed on" in got.json()["error"]["message"]
        assert not w.calls()


@pairs
async def test_a_schema_with_a_wide_number_passes(tmp_path: Path, client: str, server: str) -> None:
    schema = {"type": "object", "maxProperties": 2**70}
    tool: dict[str, Any] = {"name": "f", "input_schema": schema}
    if client != "messages":
        tool = {"type": "function", "name": "f", "parameters": schema}
    if client == "chat":
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    _, _, ((_, sent),) = await answered(tmp_path, answer(b"{}", 400), client, server, tools=[tool])
    assert str(2**70).encode() in sent


async def test_the_upstream_that_speaks_the_api_goes_first_and_a_fallback_may_speak_another(
    tmp_path: Path, renderer: TemplateRenderer
) -> None:
    async with (
        far_away(tmp_path / "far", renderer, REPLIES["text"]) as far,
        serving(answer(b"busy", 503)) as busy,
    ):
        busy_one = Upstream("busy", TextUpstream(busy.url), frozenset({"messages"}), 0, "other")
        other = Upstream("other", TextUpstream(f"{far.url}/v1"), frozenset({"chat"}))
        routed = Upstreams([other, busy_one], [RouteRule("m", "other"), RouteRule("m*", "busy")], first_s=0.0)
        async with world(tmp_path / "near", None, None, upstream=routed) as w:
            said = await CLIENTS["messages"](w).say(["hi"], stream=False)
            assert said.text == REPLIES["text"]
            assert len(busy.requests) == 1
            (call,) = w.calls()
            assert call["engine"] == "other"
            counted = await w.http.post("/v1/messages/count_tokens", json={"model": "m", "messages": []})
            assert counted.status_code == 503  # passed on to the one that counts, and to no other
        await routed.close()
