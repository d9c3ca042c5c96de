"""A dialect is one file: what this file holds, and its entry among the dialects, are all that an API needs to be
served, streamed, routed to an upstream, captured, and read back from the log."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
import orjson
import pytest

from millrace.dialects import all as dialects
from millrace.dialects.answers import WholeAnswer, number, text
from millrace.dialects.base import Dialect, ReplyStream, SideRequest, SideRoute, StreamEvent
from millrace.dialects.conversation import Ask, Part, Text, Turn, messages_of
from millrace.dialects.dialogue import dialogue
from millrace.dialects.errors import ApiError, bad_request
from millrace.dialects.reading.events import ReplyEvents
from millrace.dialects.reading.reader import DialectReader, RecordedCall, single
from millrace.dialects.rendering.template import TemplateRenderer
from millrace.infra.config import Settings
from millrace.infra.engines.upstream import TextUpstream
from millrace.infra.errors import ConfigError
from millrace.producers.gateway.app import routes
from millrace.producers.gateway.calls.choice import Choice
from millrace.producers.gateway.calls.engine_call import EngineCall
from millrace.producers.gateway.upstreams.routes import RouteRule
from millrace.producers.gateway.upstreams.upstreams import Upstream, Upstreams, make
from millrace.schemas.records import ModelCall
from tests.support.fake_http import answer, serving
from tests.support.gateway_world import ScriptedEngine, World, world


class Shouted(msgspec.Struct):
    """A request of the toy: lines, the user's and the model's in turn."""

    lines: list[str]
    model: str = ""
    stream: bool = False


def _parsed(body: bytes) -> Shouted:
    try:
        return msgspec.json.decode(body, type=Shouted)
    except msgspec.DecodeError as error:
        raise bad_request(str(error)) from None


def _turns(request: Shouted) -> list[Turn]:
    return [Turn("assistant" if at % 2 else "user", [Text(line)]) for at, line in enumerate(request.lines)]


class ToyEvents(ReplyEvents):
    """A stream of words."""

    def __init__(self) -> None:
        super().__init__()
        self._said: list[str] = []

    def take(self, event: dict[str, Any]) -> bool:
        self._said.append(text(event.get("word")) or "")
        return True

    def response(self) -> dict[str, Any]:
        return {"toy": "u-1", "said": "".join(self._said), "count": len(self._said)}


class ToyReader(DialectReader):
    """`POST /toy`."""

    def answer_in(self, found: Mapping[str, Any]) -> WholeAnswer:
        said = {"role": "assistant", "content": text(found.get("said")) or ""}
        return single(text(found.get("toy")) or "", said, "stop", (0, number(found.get("count")), 0))

    def assembler(self) -> ReplyEvents:
        return ToyEvents()


class Toy(Dialect):
    """`POST /v1/toy`."""

    name, path, prefix = "toy", "/v1/toy", "toy-"
    reader = ToyReader

    @property
    def beside(self) -> Sequence[SideRoute]:
        return (SideRoute("/{id}/loud", "GET", "loud", self._loud),)

    @staticmethod
    async def _loud(asking: SideRequest) -> bytes:
        return asking.id.upper().encode()

    def parse(self, body: bytes) -> Ask:
        request = _parsed(body)
        return Ask(model=request.model, turns=_turns(request), stream=request.stream, given=request)

    def whole(self, call: EngineCall, choices: Sequence[Choice]) -> bytes:
        (choice,) = choices
        return orjson.dumps({"toy": call.response_id, "said": choice.message()["content"], "count": len(choice.ids)})

    def stream_writer(self, call: EngineCall) -> ReplyStream:
        return ToyStream()

    def events_of(self, response: Mapping[str, Any]) -> list[StreamEvent]:
        said = text(response.get("said"))
        return [StreamEvent("", orjson.dumps({"word": said}))] if said else []

    def error(self, error: ApiError) -> bytes:
        return orjson.dumps({"toy_error": str(error)})

    def wrote(self, response: Mapping[str, Any]) -> bool:
        return "toy" in response

    def read(self, request: bytes, response: Mapping[str, Any]) -> RecordedCall:
        said = {"role": "assistant", "content": text(response.get("said")) or ""}
        return RecordedCall(messages_of(_turns(_parsed(request))), None, {0: said})


class ToyStream(ReplyStream):
    """A word an event."""

    def take(self, choice: Choice, parts: Sequence[Part], tokens: int) -> list[StreamEvent]:
        return [StreamEvent("", orjson.dumps({"word": part.text})) for part in parts if isinstance(part, Text)]

    def end(self) -> list[StreamEvent]:
        return []


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialects, "DIALECTS", (Toy(), *dialects.DIALECTS))


@pytest.fixture
async def w(tmp_path: Path, renderer: TemplateRenderer) -> AsyncIterator[World]:
    engine = ScriptedEngine(lambda *_: renderer.tokenizer.encode("Hello you!<|im_end|>"))
    async with world(tmp_path, renderer, engine) as w:
        yield w


def words(answer: httpx.Response) -> str:
    """What the events of a stream say together."""
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n") if line]
    return "".join(orjson.loads(line)["word"] for line in lines)


def test_its_routes_are_the_gateways() -> None:
    assert {("/v1/toy", "POST", "toy"), ("/v1/toy/{id}/loud", "GET", "loud")} <= set(routes())


async def test_it_is_served_streamed_and_gone_on_with_on_exact_tokens(w: World) -> None:
    key = (await w.start())["api_key"]
    headers = {"authorization": f"Bearer {key}"}
    first = (await w.http.post("/v1/toy", json={"lines": ["hi"]}, headers=headers)).json()
    assert first["said"] == "Hello you!"
    assert dialects.is_minted(first["toy"])
    lines = ["hi", first["said"], "more"]
    assert words(await w.http.post("/v1/toy", json={"lines": lines, "stream": True}, headers=headers)) == "Hello you!"
    before, after = w.calls()
    assert (after["lineage"], after["opened"]) == (before["lineage"], None)
    assert (await w.http.get("/v1/toy/abc/loud")).text == "ABC"


async def test_what_goes_wrong_is_said_in_its_words(w: World) -> None:
    answer = await w.http.post("/v1/toy", json={"lines": 3})
    assert (answer.status_code, "toy_error" in answer.json()) == (400, True)
    answer = await w.http.get("/v1/toy")
    assert (answer.status_code, "toy_error" in answer.json()) == (405, True)


async def test_it_is_read_back_from_the_log(tmp_path: Path, renderer: TemplateRenderer) -> None:
    engine = ScriptedEngine(lambda *_: renderer.tokenizer.encode("Hello you!<|im_end|>"))
    async with world(tmp_path, renderer, engine) as w:
        key = (await w.start())["api_key"]
        await w.http.post("/v1/toy", json={"lines": ["hi"]}, headers={"authorization": f"Bearer {key}"})
    async with world(tmp_path, renderer, engine) as w:
        assert not w.gateway.sessions.unreadable
        lines = ["hi", "Hello you!", "more"]
        await w.http.post("/v1/toy", json={"lines": lines}, headers={"authorization": f"Bearer {key}"})
        before, after = w.calls()
        assert after["lineage"] == before["lineage"]
        chat = dialogue(cast(ModelCall, after)).whole
        assert [message["content"] for message in chat] == ["hi", "Hello you!", "more", "Hello you!"]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_upstream_may_speak_it(tmp_path: Path, stream: bool) -> None:
    said = b'{"toy": "u-1", "said": "far away", "count": 2}'
    events = b'data: {"word": "far "}\n\ndata: {"word": "away"}\n\n'
    async with serving(answer(events if stream else said)) as far:
        upstreams = Upstreams(
            [Upstream("far", TextUpstream(far.url), frozenset({"toy"}))], [RouteRule("*", "far")], answers_all=True
        )
        async with world(tmp_path, None, None, upstream=upstreams) as w:
            got = await w.http.post("/v1/toy", json={"model": "m", "lines": ["hi"], "stream": stream})
            assert got.content == (events if stream else said)
            (call,) = w.calls()
            assert (call["response_id"], call["usage"]["completion"]) == ("u-1", 2)
            assert dialogue(cast(ModelCall, call)).whole[-1]["content"] == "far away"
            await upstreams.close()
    assert far.requests[0][0].split()[1].endswith("/toy")


async def test_settings_may_name_it() -> None:
    far = {"url": "http://h/v1", "speaks": ["toy"]}
    given = {"upstreams": {"far": far}, "routes": [{"model": "*", "upstream": "far"}]}
    found = make(Settings.model_validate({"gateway": given}), {})
    assert found is not None
    assert found.route("p", "m", "toy") is not None
    far["speaks"] = ["tay"]
    with pytest.raises(ConfigError, match=r"\[gateway.upstreams.far\] speaks: 'tay' is none of .*, toy"):
        make(Settings.model_validate({"gateway": given}), {})
