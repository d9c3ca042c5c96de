"""OpenAI's client goes on from earlier responses by their ids, whoever answered them: an upstream that keeps them, one
that is translated for it, a fallback, the policy; and never from what somebody else was told."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest

from millrace.consumers.tell.trees import event_line
from millrace.dialects.all import read
from millrace.dialects.rendering.template import TemplateRenderer
from millrace.infra.engines.base import Sampling
from millrace.infra.engines.upstream import NOT_WHOLE
from millrace.infra.log.base import Record
from millrace.infra.log.history.rows import Row
from millrace.producers.gateway.upstreams.routes import RouteRule
from millrace.producers.gateway.upstreams.upstreams import Upstream, Upstreams
from millrace.schemas import codec
from millrace.schemas.records import Event
from tests.producers.gateway.far_responses import FarResponses, refusal
from tests.support.gateway_world import ScriptedEngine, World, world
from tests.support.in_process import Answers, Played, PlayedUpstream

KEYS = {"a long random word": "one", "another random word": "two"}
both = pytest.mark.parametrize("streamed", [False, True], ids=["plain", "stream"])


class FarChat:
    """An upstream of chat completions. `asked`: its requests."""

    def __init__(self, ids: Callable[[], str] | None = None) -> None:
        numbers = itertools.count()
        self.asked: list[dict[str, Any]] = []
        self._id = ids or (lambda: f"chatcmpl-{next(numbers)}")

    def answer(self, path: str, body: bytes) -> Played:
        asked = orjson.loads(body)
        self.asked.append(asked)
        id, text = self._id(), f"chat says {len(self.asked)}"
        usage = {"prompt_tokens": 1, "completion_tokens": 1}
        if not asked.get("stream"):
            choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
            made = {"id": id, "object": "chat.completion", "choices": [choice], "usage": usage}
            return Played(parts=[orjson.dumps(made)], headers={"content-type": "application/json"})
        chunk = {"id": id, "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": "stop"}]}
        data = b"data: %s\n\ndata: [DONE]\n\n" % orjson.dumps(chunk)
        return Played(parts=[data], headers={"content-type": "text/event-stream"})


def played(name: str, answers: Answers, speaks: str, fallback: str = "") -> Upstream:
    client = PlayedUpstream(f"http://{name}.test/v1")
    client.script = answers
    return Upstream(name, client, frozenset({speaks}), fallback=fallback)


@asynccontextmanager
async def before(folder: Path, renderer: TemplateRenderer, *upstreams: Upstream, **more: Any) -> AsyncIterator[World]:
    def script(prompt: list[int], sampling: Sampling, choice: int) -> Sequence[int]:
        return renderer.tokenizer.encode("Ours.<|im_end|>")

    rules = [RouteRule(upstream.name, upstream.name) for upstream in upstreams]
    made = Upstreams(upstreams, rules, first_s=0.0)
    options = {"keys": KEYS, **more}
    async with world(folder, renderer, ScriptedEngine(script), upstream=made, **options) as w:
        yield w


def client(w: World, key: str = "a long random word", **headers: str) -> openai.AsyncOpenAI:
    return w.kept(openai.AsyncOpenAI(base_url=f"{w.url}/v1", api_key=key, max_retries=0, default_headers=headers))


def rows(w: World) -> list[Row[Event]]:
    """Every event as readers of the history have it."""
    out: list[Row[Event]] = []
    for at, kept in enumerate(w.log.read()):
        raw = Record("t.raw", 0, at, b"", kept.entry.value, {}, 0)
        out.append(Row(raw, "raw", codec.decode_as("Event", kept.entry.value), kept.entry.value))
    return out


async def told(api: openai.AsyncOpenAI, *, streamed: bool = False, **asked: Any) -> Any:
    if not streamed:
        return await api.responses.create(**asked)
    async with api.responses.stream(**asked) as events:
        return await events.get_final_response()


def said(call: dict[str, Any]) -> list[str]:
    return [message["content"] for message in read(call["request"], call["response"]).messages]


@both
async def test_one_conversation_over_all_who_answer(tmp_path: Path, renderer: TemplateRenderer, streamed: bool) -> None:
    """An upstream of Responses, one of chat, another of Responses, the policy, and back, over a restart."""
    far, other, chat = FarResponses("far"), FarResponses("other"), FarChat()
    upstreams = [
        played("far", far.answer, "responses"),
        played("other", other.answer, "responses"),
        played("chat", chat.answer, "chat"),
    ]
    last: str | None = None
    for at, model in enumerate(("far", "chat", "chat", "other", "far", "policy", "chat")):
        async with before(tmp_path, renderer, *upstreams) as w:
            asked = {"model": model, "input": f"question {at}", "previous_response_id": last}
            response = await told(client(w), streamed=streamed, **asked)
            last, calls = response.id, w.calls()
            assert [text for text in said(calls[-1]) if text.startswith("question")] == [
                f"question {n}" for n in range(at + 1)
            ]
            assert calls[-1]["opened"] != NOT_WHOLE
            assert calls[-1]["identified_by"] == ("response_id" if at else "first")
            assert len({event["trajectory"] for event in w.events()}) == 1
            if model in ("chat", "policy"):
                assert response.previous_response_id == asked["previous_response_id"]
                assert (await client(w).responses.retrieve(last)).output_text == response.output_text
    assert len(chat.asked[-1]["messages"]) == len(said(calls[-1]))
    handed = orjson.loads(far.bodies[-1])  # it answered before, but not what it is asked to go on from
    assert "previous_response_id" not in handed
    assert all("id" not in item and item.get("type") != "reasoning" for item in handed["input"])


async def test_nobody_goes_on_from_what_another_was_told(tmp_path: Path, renderer: TemplateRenderer) -> None:
    """Upstreams know one key for all: the gateway keeps callers apart."""
    far, chat = FarResponses(), FarChat()
    upstreams = [played("far", far.answer, "responses"), played("chat", chat.answer, "chat")]
    async with before(tmp_path, renderer, *upstreams) as w:
        mine, other = client(w), client(w, "another random word")
        of_name = client(w, **{"session-id": "t-1"})
        for model in ("far", "chat"):
            first = await told(mine, model=model, input="secret")
            named = await told(of_name, model=model, input="secret")
            of_user = await told(mine, model=model, input="secret", user="ann")
            seen = len(far.bodies), len(chat.asked), len(w.events())
            for api, response in (
                (other, first),
                (of_name, first),
                (mine, named),
                (client(w, **{"session-id": "t-2"}), named),
                (mine, of_user),
            ):
                for asked in ("far", "chat", "policy"):
                    with pytest.raises(openai.BadRequestError) as refused:
                        await told(api, model=asked, input="so", previous_response_id=response.id)
                    assert refused.value.code == "previous_response_not_found"
                    item = [{"type": "item_reference", "id": response.output[0].id}]
                    with pytest.raises(openai.NotFoundError, match="Item with id"):
                        await told(api, model=asked, input=item)
            assert (len(far.bodies), len(chat.asked), len(w.events())) == seen
            for api, response, more in ((mine, first, {}), (of_name, named, {}), (mine, of_user, {"user": "ann"})):
                await told(api, model="far", input="so", previous_response_id=response.id, **more)
                assert w.calls()[-1]["opened"] != NOT_WHOLE


async def test_what_nobody_here_knows(tmp_path: Path, renderer: TemplateRenderer) -> None:
    """Its upstream may: the bytes pass. Who has no words for an id refuses it as OpenAI does."""
    far, chat = FarResponses(), FarChat()
    upstreams = [played("far", far.answer, "responses"), played("chat", chat.answer, "chat")]
    abroad = orjson.loads(far.answer("/responses", b'{"input": "abroad"}').parts[0])["id"]
    async with before(tmp_path, renderer, *upstreams) as w:
        first = await told(client(w), model="far", input="so", previous_response_id=abroad)
        second = await told(client(w), model="far", input="and", previous_response_id=first.id)
        calls = w.calls()
        assert [(call["opened"], call["identified_by"]) for call in calls] == [
            (NOT_WHOLE, "first"),
            (NOT_WHOLE, "response_id"),
        ]
        lines = [event_line(row) for row in rows(w) if row["kind"] == "model_call"]
        assert all(line.endswith(f", not whole: {NOT_WHOLE}") for line in lines)
        assert len(far.read[second.id]) == 3 + len(far.told[abroad]["output"]) + len(far.told[first.id]["output"])
        for model in ("chat", "policy"):
            for id in (abroad, first.id, "resp_none"):
                with pytest.raises(openai.BadRequestError) as refused:
                    await told(client(w), model=model, input="so", previous_response_id=id)
                assert (refused.value.code, refused.value.param) == (
                    "previous_response_not_found",
                    "previous_response_id",
                )
        with pytest.raises(openai.BadRequestError):
            await told(client(w), model="far", input="so", previous_response_id="resp_none")
        await told(client(w), model="far", input="so", conversation="conv_1")
        assert w.calls()[-1]["opened"] == NOT_WHOLE
    assert not chat.asked


async def test_a_fallback_is_told_what_it_cannot_know(tmp_path: Path, renderer: TemplateRenderer) -> None:
    far, spare, down = FarResponses("far"), FarResponses("spare"), False

    def answers(path: str, body: bytes) -> Played:
        return refusal(503, "down") if down else far.answer(path, body)

    upstreams = [
        played("far", answers, "responses", fallback="spare"),
        played("spare", spare.answer, "responses"),
    ]
    async with before(tmp_path, renderer, *upstreams) as w:
        first = await told(client(w), model="far", input="first")
        down = True
        second = await told(client(w), model="far", input="second", previous_response_id=first.id)
        down = False
        await told(client(w), model="far", input="third", previous_response_id=second.id)
        assert said(w.calls()[-1])[-1] == "third"
        assert [text for text in said(w.calls()[-1]) if "says" not in text and text] == ["first", "second", "third"]
        assert [call["engine"] for call in w.calls()] == ["far", "spare", "far"]
    assert b"previous_response_id" not in far.bodies[-1] + spare.bodies[-1]


@pytest.mark.parametrize("model", ["far", "chat"])
async def test_an_id_that_is_given_twice_means_nothing(tmp_path: Path, renderer: TemplateRenderer, model: str) -> None:
    """Whatever a server does that numbers its responses anew after each start: nobody is given another's words."""
    first_, second_ = FarResponses("far"), FarResponses("far")
    far, chat = [first_], FarChat(lambda: "chatcmpl-1")

    def answers(path: str, body: bytes) -> Played:
        return far[0].answer(path, body)

    upstreams = [played("far", answers, "responses"), played("chat", chat.answer, "chat")]
    async with before(tmp_path, renderer, *upstreams) as w:
        mine, other = client(w), client(w, "another random word")
        first = await told(mine, model=model, input="secret of one")
        far[0] = second_
        second = await told(other, model=model, input="secret of two")
        assert first.id == second.id
        for api in (mine, other):
            with pytest.raises(openai.BadRequestError):
                await told(api, model="policy", input="so", previous_response_id=first.id)
        third = await told(other, model=model, input="three")
        assert third.id != second.id or model == "chat"
    async with before(tmp_path, renderer, *upstreams) as w:
        for key in KEYS:
            with pytest.raises(openai.BadRequestError):
                await told(client(w, key), model="policy", input="so", previous_response_id=first.id)
