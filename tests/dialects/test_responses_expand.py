"""A conversation by ids is the conversation whole: same prompts, same lineages, same records, over restarts; and what
is not its caller's is not known."""

from __future__ import annotations

import asyncio
import tempfile
import zlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.dialects.all import read
from millrace.dialects.dialogue import dialogue
from millrace.dialects.rendering.template import TemplateRenderer
from millrace.dialects.responses.expand import request_items
from millrace.dialects.responses.request import parse_any
from millrace.infra.engines.base import Sampling
from millrace.schemas import codec
from tests.support.gateway_world import ScriptedEngine, World, world
from tests.support.in_process import InProcess, Played
from tests.support.recorded import recorded_calls

PATH = "/v1/responses"
TOOL: dict[str, Any] = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1.0, "b": "ü"}}\n</tool_call>'
REPLIES = (
    "Yes.",
    "<think>\nhm\n</think>\n\nSo it is.",
    f"Look.\n{CALL}",
    f"<think>\nwhich?\n</think>\n\n{CALL}\n{CALL}",
)
HOW = ("previous", "references", "whole")
steps = st.lists(
    st.one_of(
        st.tuples(st.just("turn"), st.integers(0, 9), st.sampled_from(HOW), st.sampled_from(("", "s"))),
        st.tuples(st.just("again"), st.integers(0, 9), st.none(), st.none()),
        st.tuples(st.just("restart"), st.none(), st.none(), st.none()),
    ),
    max_size=12,
)


class Player:
    """An agent that says the same in two sessions: whole in one, by ids in the other."""

    def __init__(self, folder: Path, renderer: TemplateRenderer) -> None:
        self.folder, self.renderer = folder, renderer
        self.prompts: list[list[int]] = []
        self.turns: list[list[tuple[dict[str, Any], list[Any], dict[str, Any]]]] = []
        """for each turn and session: the request, its items whole, the response"""
        self.gateway = self.opened()

    def opened(self) -> InProcess:
        return InProcess(self.folder, self.renderer, self.script)

    def script(self, body: bytes) -> Played:
        """Replies follow from prompts."""
        prompt = orjson.loads(body)["token_ids"]
        self.prompts.append(prompt)
        ids = self.renderer.tokenizer.encode(REPLIES[zlib.crc32(repr(prompt).encode()) % len(REPLIES)] + "<|im_end|>")
        logprobs = {"content": [{"logprob": -0.5}] * len(ids)}
        spans = [{"version": "policy@0", "start": 0, "end": len(ids)}]
        choice = {"index": 0, "token_ids": ids, "logprobs": logprobs, "finish_reason": "stop", "weight_versions": spans}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        return Played(parts=[orjson.dumps({"choices": [choice], "usage": usage})])

    async def ask(self, session: int, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"x-millrace-session": f"chat-{session}"}
        answer = await self.gateway.ask("POST", PATH, orjson.dumps(body), headers)
        assert answer.status == 200, answer
        return dict(answer.json)

    async def turn(self, which: int, how: str, instructions: str) -> None:
        """Go on from turn `which`, counted from the newest."""
        number, former = len(self.turns), self.turns[-1 - which % len(self.turns)] if self.turns else None
        made = []
        for session in (0, 1):
            said: list[Any] = [{"role": "user", "content": f"turn {number}"}]
            whole, sent, more = said, said, dict[str, Any]()
            if former is not None:
                _, asked, response = former[session]
                output = response["output"]
                said = [
                    *({"type": "function_call_output", "call_id": item["call_id"], "output": "7"}
                      for item in output if item["type"] == "function_call"),
                    *said,
                ]  # fmt: skip
                whole = sent = [*asked, *output, *said]
                if session and how == "previous":
                    sent, more = said, {"previous_response_id": response["id"]}
                elif session and how == "references":  # as the AI SDK does
                    named = [{"type": "item_reference", "id": item["id"]} for item in output]
                    sent = [*asked, *named, *said]
            body = {"model": "m", "input": sent, "tools": [TOOL], "instructions": instructions or None, **more}
            made.append((body, whole, await self.ask(session, body)))
        self.turns.append(made)

    async def again(self, which: int) -> None:
        """A client that did not get the answer asks once more."""
        if self.turns:
            bodies = [one[0] for one in self.turns[-1 - which % len(self.turns)]]
            answers = [await self.ask(session, body) for session, body in enumerate(bodies)]
            at = len(self.turns) - 1 - which % len(self.turns)
            self.turns[at] = [(*one[:2], new) for one, new in zip(self.turns[at], answers, strict=True)]

    def calls(self) -> list[dict[str, Any]]:
        return recorded_calls(codec.decode_as("Event", kept.entry.value) for kept in self.gateway.log.read())


def stood(call: dict[str, Any], names: dict[str, str]) -> Any:
    """Where a call stands in its session, with names that do not depend on the session."""
    lineage = names.setdefault(call["lineage"], str(len(names)))
    names[call["response_id"]] = f"of {lineage} at {call['prefix_len']} {call['turn']}"
    fields = ("opened", "turn", "prefix_len", "prompt_ids", "output_ids", "trainable")
    return lineage, names.get(call["supersedes"] or ""), [call[field] for field in fields]


def unnamed(found: Any, ids: list[str]) -> bytes:
    """Without the ids that were minted."""
    text = orjson.dumps(found).decode()
    for at, id in enumerate(ids):
        text = text.replace(id, f"id {at}")
    return text.encode()


async def play(folder: Path, renderer: TemplateRenderer, steps: Sequence[tuple[Any, Any, Any, Any]]) -> None:
    player = Player(folder, renderer)
    for what, which, how, instructions in steps:
        if what == "restart":
            await player.gateway.close()
            player.gateway = player.opened()
            assert not player.gateway.sessions.unreadable
        else:
            await (player.again(which) if what == "again" else player.turn(which, how, instructions))
    assert player.prompts[::2] == player.prompts[1::2]
    calls = player.calls()
    whole, named = (list(calls[start::2]) for start in (0, 1))
    places: list[dict[str, str]] = [{}, {}]
    minted: list[list[str]] = [[], []]
    for one, other in zip(whole, named, strict=True):
        assert stood(one, places[0]) == stood(other, places[1])
        for ids, call in zip(minted, (one, other), strict=True):
            output = orjson.loads(call["response"])["output"]
            ids += [item["call_id"] for item in output if item["type"] == "function_call"]
        told = [dialogue(call) for call in (one, other)]  # type: ignore[arg-type]
        assert unnamed(told[0], minted[0]) == unnamed(told[1], minted[1])
        asked = [read(call["request"], call["response"]).messages for call in (one, other)]
        assert unnamed(asked[0], minted[0]) == unnamed(asked[1], minted[1])
    kept = player.gateway.sessions.replies.stored
    await player.gateway.close()
    again = player.opened()
    for call in calls:
        mine, theirs = (one._kept[call["response_id"]] for one in (kept, again.sessions.replies.stored))
        assert mine.conversation() == theirs.conversation()
        assert mine.conversation() is not None
        items = orjson.loads(call["response"])["output"]
        assert list(map(orjson.loads, theirs.conversation() or ())) == [
            *request_items(parse_any(call["request"])),
            *items,
        ]
    assert kept.size == again.sessions.replies.stored.size
    await again.close()


@settings(max_examples=40, deadline=None)
@given(steps=steps)
def test_by_ids_is_whole(renderer: TemplateRenderer, steps: list[tuple[Any, Any, Any, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(play(Path(folder), renderer, steps))


# ---------------------------------------------------------------------- over HTTP, by OpenAI's client

KEYS = {"a long random word": "one", "another random word": "two"}


@pytest.fixture
async def w(tmp_path: Path, renderer: TemplateRenderer) -> AsyncIterator[World]:
    async with served(tmp_path, renderer, keys=KEYS) as w:
        yield w


def served(folder: Path, renderer: TemplateRenderer, **options: Any) -> Any:
    def script(prompt: list[int], sampling: Sampling, choice: int) -> Sequence[int]:
        return renderer.tokenizer.encode(engine.says + "<|im_end|>")

    engine = ScriptedEngine(script)
    engine.says = "<think>\nhm\n</think>\n\nYes."
    return world(folder, renderer, engine, **options)


def client(w: World, key: str = "a long random word", **headers: str) -> openai.AsyncOpenAI:
    return w.kept(openai.AsyncOpenAI(base_url=f"{w.url}/v1", api_key=key, max_retries=0, default_headers=headers))


async def test_a_conversation_goes_on_by_its_last_response(tmp_path: Path, renderer: TemplateRenderer) -> None:
    """Nameless, streamed in turn, and over a restart of the gateway."""
    last: str | None = None
    for number in range(4):
        async with served(tmp_path, renderer) as w:
            given: dict[str, Any] = {"model": "m", "input": f"{number}", "previous_response_id": last}
            if number % 2:
                async with client(w).responses.stream(**given) as events:
                    response = (await events.get_final_response()).model_dump()
            else:
                response = (await client(w).responses.create(**given)).model_dump()
            assert (response["previous_response_id"], response["store"]) == (last, True)
            last = response["id"]
            stored = (await client(w).responses.retrieve(last)).model_dump()
            told = [[item["id"] for item in one["output"]] + [one["usage"]] for one in (response, stored)]
            assert told[0] == told[1]
            assert stored["output"][1]["content"][0]["text"] == "Yes."
            prompt = renderer.tokenizer.decode(w.engine.asked[0].prompt)
            assert [f"user\n{n}<" in prompt for n in range(4)] == [n <= number for n in range(4)]
            calls, events_of = w.calls(), {event["trajectory"] for event in w.events()}
    assert len(events_of) == 1
    assert [call["opened"] for call in calls[1:]] == [None] * 3
    assert len({call["lineage"] for call in calls}) == 1


async def test_an_id_says_whose_call_it_is(w: World) -> None:
    """Two nameless callers say the same and are told the same: only ids tell them apart."""
    first, second = [await client(w).responses.create(model="m", input="hi") for _ in range(2)]
    for before in (second, first):
        await client(w).responses.create(model="m", input="so", previous_response_id=before.id)
    of = {event["data"]["response_id"]: event["trajectory"] for event in w.events() if event["kind"] == "model_call"}
    one, two, after_two, after_one = of.values()
    assert (after_one, after_two) == (one, two)
    assert one != two
    assert all(call["opened"] in (None, "it is the first call") for call in w.calls())


async def test_it_goes_on_when_its_episode_has_ended(w: World) -> None:
    first = await client(w).responses.create(model="m", input="hi")
    (session,) = w.gateway.sessions.live.values()
    await w.gateway.end(session, status="completed", stop_condition="idle")
    second = await client(w).responses.create(model="m", input="so", previous_response_id=first.id)
    assert len({event["trajectory"] for event in w.events()}) == 2
    assert "user\nhi<" in w.gateway.engines.served["policy"].renderer.tokenizer.decode(w.engine.asked[1].prompt)  # type: ignore[union-attr]
    await client(w).responses.create(model="m", input="and", previous_response_id=second.id)
    assert w.calls()[-1]["opened"] is None


async def test_what_its_caller_was_not_told_is_not_known(w: World) -> None:
    """Another tenant's, another session's, another user's, a named one's, one that was not to be stored."""
    mine = client(w)
    told = await mine.responses.create(model="m", input="secret")
    of_name = await client(w, **{"session-id": "t-1"}).responses.create(model="m", input="secret")
    of_user = await mine.responses.create(model="m", input="secret", user="ann")
    not_stored = await mine.responses.create(model="m", input="secret", store=False)
    auth = {"authorization": "Bearer a long random word"}
    keys = [(await w.http.post("/v1/sessions", json={}, headers=auth)).json()["api_key"] for _ in range(2)]
    started = await client(w, keys[0]).responses.create(model="m", input="secret")
    before = len(w.engine.asked)
    for api, response in [
        (client(w, "another random word"), told),
        (client(w, keys[0]), told),
        (client(w, keys[1]), started),
        (mine, started),
        (mine, of_name),
        (client(w, **{"session-id": "t-2"}), of_name),
        (mine, of_user),
        (mine, not_stored),
        (mine, None),
    ]:
        id = response.id if response else "resp_none"
        with pytest.raises(openai.BadRequestError) as refused:
            await api.responses.create(model="m", input="so", previous_response_id=id)
        assert refused.value.code == "previous_response_not_found"
        assert refused.value.param == "previous_response_id"
        assert refused.value.body["message"] == f"Previous response with id '{id}' not found."  # type: ignore[index]
        item = response.output[0].id if response else "rs_none_0"
        with pytest.raises(openai.NotFoundError, match=f"Item with id '{item}' not found"):
            await api.responses.create(model="m", input=[{"type": "item_reference", "id": item}])
        with pytest.raises(openai.NotFoundError, match=f"Response with id '{id}' not found"):
            await api.responses.retrieve(id)
    assert len(w.engine.asked) == before
    for api, response in [(client(w, keys[0]), started), (client(w, **{"session-id": "t-1"}), of_name)]:
        assert (await api.responses.retrieve(response.id)).id == response.id
        await api.responses.create(model="m", input="so", previous_response_id=response.id)
    await mine.responses.create(model="m", input="so", user="ann", previous_response_id=of_user.id)


@pytest.mark.parametrize("items", [[{"id": 7}], [{"type": "item_reference"}], [{"id": "msg_1", "type": None}]])
async def test_a_reference_to_nothing_is_refused(w: World, items: list[Any]) -> None:
    answer = await w.http.post(
        PATH, json={"model": "m", "input": items}, headers={"authorization": "Bearer a long random word"}
    )
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] in ("input", "input[0]")
    assert not w.events()
