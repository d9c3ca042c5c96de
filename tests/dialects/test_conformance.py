"""What every dialect keeps, driven by the real client of its API: the same words plain and streamed, tools there and
back, exact tokens whatever the client echoes, errors as its client knows them, and every call in the log once."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import orjson
import pytest

from millrace.dialects.all import DIALECTS
from millrace.dialects.dialogue import dialogue
from millrace.dialects.rendering.template import TemplateRenderer
from millrace.infra.engines.base import Sampling
from millrace.infra.errors import EngineRejected, EngineTimeout, EngineUnavailable
from millrace.producers.gateway.app import routes
from millrace.schemas.arrays import unpack
from millrace.schemas.records import ModelCall
from tests.support.gateway_world import ScriptedEngine, World, world
from tests.support.speakers import ALL, SPEAKERS, Results, Said, Speaker

ONE = '<tool_call>\n{"name": "add", "arguments": {"a": 1.0, "b": "Zürich"}}\n</tool_call>'
TWO = '<tool_call>\n{"name": "lookup", "arguments": {}}\n</tool_call>'
REPLIES = {
    "text": "The answer is 42.",
    "spaces": "\n a \n\n b ",
    "nothing": "",
    "thoughts": "<think>\nhm, 3 + 4\n</think>\n\nSeven.",
    "call": f"Let me check.\n{ONE}",
    "calls": f"{ONE}\n{TWO}",
    "all": f"<think>\nwhich tool?\n</think>\n\nBoth.\n{ONE}\n{TWO}",
    "no call": "<tool_call>\n{not json}\n</tool_call>",
    "unicode": "Zürich 🙂 ende",
}
TOOLS = ("add", "lookup")
ABLE = {"tools": "tools", "n": "several", "stop": "stops", "body": "posts", "retry": "retrying"}
FIELDS = {"tools": [{"type": "function", "function": {"name": "add"}}], "n": 2, "stop": ["is"]}
HOLES = {
    ("completions", "tools"): "a prompt that no template writes has no tools and no thoughts",
    ("messages", "n"): "a message is one",
    ("messages", "stop"): "it is called stop_sequences",
    ("responses", "n"): "a response is one",
    ("responses", "stop"): "a response names no stop strings",
    ("responses over a WebSocket", "n"): "a response is one",
    ("responses over a WebSocket", "stop"): "a response names no stop strings",
    ("responses over a WebSocket", "body"): "its frames are in tests/producers/gateway/test_socket.py",
    ("responses over a WebSocket", "retry"): "its client asks again only where its user does",
}
"""what an API does not have, so that the field is one that nobody knows"""
both = pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])


@pytest.fixture
async def w(tmp_path: Path, renderer: TemplateRenderer) -> AsyncIterator[World]:
    def script(prompt: list[int], sampling: Sampling, choice: int) -> Sequence[int]:
        return renderer.tokenizer.encode(engine.says + "<|im_end|>")

    engine = ScriptedEngine(script)
    engine.says = REPLIES["text"]
    async with world(tmp_path, renderer, engine, patience_s=0.0) as w:
        yield w


@pytest.fixture(params=ALL, ids=lambda kind: kind.name)
def speaks(request: pytest.FixtureRequest) -> type[Speaker]:
    kind: type[Speaker] = request.param
    return kind


def needs(speaks: type[Speaker], cell: str) -> None:
    """Skips what an API does not have, by its name."""
    if not getattr(speaks, ABLE[cell]):
        pytest.skip(f"{speaks.name} has no {cell}: {HOLES[speaks.name, cell]}")


async def spoken(w: World, speaks: type[Speaker], **more: Any) -> Speaker:
    """A client in a session of its own."""
    return speaks(w, (await w.start())["api_key"], **more)


def exact(w: World) -> None:
    """Each call goes on behind the tokens of the one before."""
    calls = w.calls()
    for asked, before, call in zip(w.engine.asked[1:], calls, calls[1:], strict=False):
        former = [*unpack(before["prompt_ids"]), *unpack(before["output_ids"])]
        assert call["opened"] is None
        assert call["lineage"] == before["lineage"]
        assert call["prefix_len"] == before["prefix_len"] + len(former)
        assert asked.prompt[call["prefix_len"] :] == unpack(call["prompt_ids"]).tolist()


def _plain(chat: Any) -> Any:
    """A chat whose arguments are objects, whose fields are in one order."""
    for message in chat[0]:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = orjson.loads(call["function"]["arguments"])
    return orjson.dumps(chat, option=orjson.OPT_SORT_KEYS)


def _text(choice: Any) -> str:
    """What a choice, or a chunk of one, says."""
    message = choice.get("message") or choice.get("delta") or {}
    return choice.get("text") or message.get("content") or ""


def test_every_dialect_has_a_client_here() -> None:
    lacking = {(kind.name, cell) for kind in ALL for cell in ABLE if not getattr(kind, ABLE[cell])}
    assert lacking == set(HOLES) - {("messages", "stop")}
    assert {(speaker.name, speaker.path) for speaker in SPEAKERS} == {(one.name, one.path) for one in DIALECTS}
    assert {(one.path, "POST", one.name) for one in DIALECTS} <= set(routes())


@pytest.mark.parametrize("reply", REPLIES)
async def test_a_reply_says_the_same_whole_and_streamed(w: World, speaks: type[Speaker], reply: str) -> None:
    w.engine.says = REPLIES[reply]
    said = [
        await (await spoken(w, speaks)).say(["hi"], stream=stream, tools=TOOLS, system="s") for stream in (False, True)
    ]
    whole, streamed = said
    assert (whole.text, whole.thoughts, whole.end) == (streamed.text, streamed.thoughts, streamed.end)
    assert [call[1:] for call in whole.calls] == [call[1:] for call in streamed.calls]
    assert whole.tokens == streamed.tokens == (len(w.engine.asked[0].prompt), len(w.engine.asked[0].ids[0]))
    assert [call["response_id"] for call in w.calls()] == [whole.id, streamed.id]
    assert all(call["trainable"] for call in w.calls())


async def test_dialects_say_the_same(w: World) -> None:
    """Prompts, words and calls do not depend on the API that asked."""
    w.engine.says = REPLIES["all"]
    kinds = [kind for kind in SPEAKERS if kind.tools]
    said = [await (await spoken(w, kind)).say(["hi"], stream=False, tools=TOOLS, system="s") for kind in kinds]
    assert len({(one.text, one.thoughts, one.end, one.tokens) for one in said}) == 1
    assert all([call[1:] for call in one.calls] == [call[1:] for call in said[0].calls] for one in said)
    assert all(asked.prompt == w.engine.asked[0].prompt for asked in w.engine.asked)


@both
async def test_parallel_tools_go_round_on_exact_tokens(w: World, speaks: type[Speaker], stream: bool) -> None:
    needs(speaks, "tools")
    client, talk = await spoken(w, speaks), list[Any](["What is 3 + 4?"])
    for reply in ("all", "text", "call", "text"):
        w.engine.says = REPLIES[reply]
        said = await client.say(talk, stream=stream, tools=TOOLS, system="s")
        talk.append(said)
        if said.calls:
            assert said.end == "tool_calls"
            assert [name for _, name, _ in said.calls] == list(TOOLS[: len(said.calls)])
            assert said.calls[0][2] == {"a": 1.0, "b": "Zürich"}
            talk.append(Results({id: f"{name} is done" for id, name, _ in said.calls}))
        else:
            talk.append("And again?")
    assert len(w.calls()) == 4
    exact(w)


@both
async def test_thoughts_that_are_dropped_break_no_lineage(w: World, speaks: type[Speaker], stream: bool) -> None:
    needs(speaks, "tools")
    client = await spoken(w, speaks)
    w.engine.says = REPLIES["thoughts"]
    said = await client.say(["hi"], stream=stream)
    assert (said.thoughts.strip(), said.text) == ("hm, 3 + 4", "Seven.")
    plain = {"role": "assistant", "content": "Seven."}
    await client.say(["hi", Said("", "", "", (), "", (0, 0), plain), "more"], stream=stream)
    exact(w)


@both
async def test_a_stop_string_ends_it(w: World, speaks: type[Speaker], stream: bool) -> None:
    needs(speaks, "stop")
    client = await spoken(w, speaks)
    said = await client.say(["hi"], stream=stream, stop=["is"])
    assert w.engine.asked[0].sampling.stop == ("is",)
    assert said.text == "The answer "


@both
async def test_a_length_ends_it(w: World, speaks: type[Speaker], stream: bool) -> None:
    said = await (await spoken(w, speaks)).say(["hi"], stream=stream, most=3)
    assert (said.end, said.tokens[1]) == ("length", 3)
    assert w.calls()[0]["finish_reason"] == "length"


@both
async def test_several_replies(w: World, speaks: type[Speaker], stream: bool) -> None:
    needs(speaks, "n")
    answer = await w.http.post(speaks.path, json={**speaks(w).body("hi"), "n": 2, "stream": stream})
    assert answer.status_code == 200
    if stream:
        events = [orjson.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: {")]
        told = [choice for event in events for choice in event["choices"]]
        assert sorted(choice["index"] for choice in told if choice["finish_reason"]) == [0, 1]
    else:
        told = answer.json()["choices"]
    for at in range(2):
        assert "".join(_text(choice) for choice in told if choice["index"] == at) == REPLIES["text"]
    assert [call["choice"] for call in w.calls()] == [0, 1]
    assert len({call["response_id"] for call in w.calls()}) == 1


@pytest.mark.parametrize(("api", "cell"), [hole for hole in HOLES if hole[0] in {kind.name for kind in SPEAKERS}])
async def test_what_an_api_does_not_have_is_a_field_that_nobody_knows(w: World, api: str, cell: str) -> None:
    speaks = next(kind for kind in SPEAKERS if kind.name == api)
    body = {**speaks(w).body("hi"), cell: FIELDS[cell]}
    assert (await w.http.post(speaks.path, json=body)).status_code == 200
    assert (w.engine.asked[0].sampling.n, w.engine.asked[0].sampling.stop) == (1, ())
    w.gateway.options = replace(w.gateway.options, strict=True)
    refused = await w.http.post(speaks.path, json=body)
    assert refused.status_code == 400
    assert cell in refused.json()["error"]["message"]
    assert len(w.calls()) == 1


# ---------------------------------------------------------------------- what goes wrong


@both
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (EngineRejected("no", 400), 400),
        (EngineUnavailable("busy", status=429), 429),
        (EngineUnavailable("gone"), 502),
        (EngineUnavailable("later", status=503), 503),
        (EngineTimeout("silent"), 504),
    ],
    ids=str,
)
async def test_the_client_knows_what_failed(
    w: World, speaks: type[Speaker], stream: bool, error: Any, status: int
) -> None:
    w.engine.error = error
    with pytest.raises(speaks.failed) as raised:
        await (await spoken(w, speaks)).say(["hi"], stream=stream)
    assert getattr(raised.value, "status_code", None) == status
    assert w.calls() == []


async def test_an_error_behind_the_first_token_is_raised_too(w: World, speaks: type[Speaker]) -> None:
    w.engine.error, w.engine.break_after = EngineUnavailable("gone"), 3
    with pytest.raises(speaks.failed, match="broke off"):
        await (await spoken(w, speaks)).say(["hi"], stream=True)
    (call,) = w.calls()
    assert (call["finish_reason"], call["trainable"]) == ("abort", False)
    assert len(unpack(call["output_ids"])) == 3


async def test_a_wrong_key_is_told_so(w: World, speaks: type[Speaker]) -> None:
    with pytest.raises(speaks.unauthorized):
        await speaks(w, "mr-x.y").say(["hi"], stream=False)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"model":"m","messages":3}', b"\xff", b"NaN", b'"' * 3])
async def test_a_body_that_is_no_request_is_refused(w: World, speaks: type[Speaker], body: bytes) -> None:
    needs(speaks, "body")
    answer = await w.http.post(speaks.path, content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert answer.json()["error"]["message"]


@both
async def test_a_client_that_leaves_ends_its_call(w: World, speaks: type[Speaker], stream: bool) -> None:
    w.engine.gate = asyncio.Semaphore(3)
    client = await spoken(w, speaks)
    if stream:
        await (await client.first(["hi"])).close()
    else:
        asking = asyncio.create_task(client.say(["hi"], stream=False))
        async with asyncio.timeout(60):
            while not w.engine.asked:
                await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    async with asyncio.timeout(60):
        while not w.calls():
            await asyncio.sleep(0.01)
    (call,) = w.calls()
    assert (call["finish_reason"], call["trainable"]) == ("abort", False)
    assert w.engine.left_early == 1


async def test_a_conversation_goes_on_on_exact_tokens(w: World, speaks: type[Speaker]) -> None:
    client, talk = await spoken(w, speaks), list[Any](["hi"])
    for stream in (False, True, False):
        talk += [await client.say(talk, stream=stream, system="s"), "and now?"]
    assert len(w.calls()) == 3
    exact(w)


@both
async def test_a_retry_makes_one_step(w: World, speaks: type[Speaker], stream: bool) -> None:
    """What the client's own retry sends again after a failure is one call, and what it sends again after a success
    supersedes the first."""
    needs(speaks, "retry")
    client = await spoken(w, speaks, retries=2)
    fails, generate = iter([EngineUnavailable("gone")]), w.engine.generate

    def flaky(*args: Any, **named: Any) -> Any:
        w.engine.error = next(fails, None)
        return generate(*args, **named)

    w.engine.generate = flaky
    first = await client.say(["hi"], stream=stream)
    (call,) = w.calls()
    assert (call["response_id"], call["supersedes"]) == (first.id, None)
    again = await client.say(["hi"], stream=stream)
    assert [(call["response_id"], call["supersedes"]) for call in w.calls()] == [(first.id, None), (again.id, first.id)]
    assert len({call["turn"] for call in w.calls()}) == 1
    assert len({call["lineage"] for call in w.calls()}) == 1


# ---------------------------------------------------------------------- what is kept


async def test_a_session_goes_on_after_a_restart(
    tmp_path: Path, renderer: TemplateRenderer, speaks: type[Speaker]
) -> None:
    engine = ScriptedEngine(lambda *_: renderer.tokenizer.encode(REPLIES["all"] + "<|im_end|>"))
    async with world(tmp_path, renderer, engine) as w:
        key = (await w.start())["api_key"]
        said = await speaks(w, key).say(["hi"], stream=False, tools=TOOLS, system="s")
        assert bool(said.calls) == speaks.tools
    async with world(tmp_path, renderer, engine) as w:
        assert not w.gateway.sessions.unreadable
        talk = ["hi", said, Results({id: "done" for id, *_ in said.calls}) if said.calls else "more"]
        await speaks(w, key).say(talk, stream=True, tools=TOOLS, system="s")
        exact(w)


async def test_every_reader_of_the_log_finds_the_same_chat(w: World) -> None:
    """What exports and `why` read of a call does not depend on its API, but for the random ids of tool calls."""
    w.engine.says = REPLIES["all"]
    found = []
    kinds = [kind for kind in SPEAKERS if kind.tools]
    for kind in kinds:
        client = await spoken(w, kind)
        said = await client.say(["hi"], stream=False, tools=TOOLS, system="s")
        results = Results({id: "done" for id, *_ in said.calls})
        await client.say(["hi", said, results], stream=True, tools=TOOLS, system="s")
    for call in w.calls():
        told = dialogue(cast(ModelCall, call))
        text = orjson.dumps([told.whole, told.tools]).decode()
        for number, id in enumerate(dict.fromkeys(re.findall(r"call_\w+", text))):
            text = text.replace(id, str(number))
        found.append(_plain(orjson.loads(text)))
    half = len(w.calls()) // len(kinds)
    assert all(found[at] == found[at % half] for at in range(len(found)))


async def test_a_nameless_conversation_is_found_by_what_it_echoes(w: World, speaks: type[Speaker]) -> None:
    needs(speaks, "tools")
    w.engine.says = REPLIES["calls"]
    client = speaks(w)
    said = await client.say(["hi"], stream=False, tools=TOOLS)
    await client.say(["hi", said, Results({id: "1" for id, *_ in said.calls})], stream=False, tools=TOOLS)
    assert len({event["trajectory"] for event in w.events() if event["kind"] == "model_call"}) == 1
    exact(w)


async def test_a_call_is_recorded_as_it_went_over_the_wire(w: World, speaks: type[Speaker]) -> None:
    needs(speaks, "body")
    body = orjson.dumps(speaks(w).body("hi"))
    answer = await w.http.post(speaks.path, content=body)
    (call,) = w.calls()
    assert (call["request"], call["response"]) == (body, answer.content)
