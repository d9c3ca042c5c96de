"""A conversation that an upstream keeps is in the log what that upstream's model read: whole, in the episode of the
response that it goes on from, or said to be not whole; and what passes is what came."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millrace.dialects.all import RESPONSES, read
from millrace.dialects.dialogue import Unsayable, dialogue
from millrace.dialects.rendering.template import TemplateRenderer
from millrace.infra.engines.upstream import NOT_WHOLE
from millrace.producers.gateway.upstreams.routes import RouteRule
from millrace.schemas import codec
from millrace.schemas.ids import now_micros
from tests.producers.gateway.far_responses import FarResponses
from tests.support.in_process import Far, InProcess, Played
from tests.support.recorded import Recorded

PATH = "/v1/responses"
steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("turn"), st.integers(0, 9), st.sampled_from(("previous", "references", "whole")), st.booleans()
        ),
        st.tuples(st.just("turn"), st.integers(0, 1), st.just("previous"), st.booleans()),
        st.tuples(st.just("ours"), st.integers(0, 2), st.just("previous"), st.just(False)),
        st.tuples(st.just("again"), st.integers(0, 9), st.none(), st.none()),
        st.tuples(st.just("abroad"), st.none(), st.none(), st.booleans()),
        st.tuples(st.just("restart"), st.none(), st.none(), st.none()),
        st.tuples(st.just("forget"), st.none(), st.none(), st.none()),
        st.tuples(st.just("end"), st.none(), st.none(), st.none()),
    ),
    min_size=3,
    max_size=14,
)


class Talk:
    """One turn: its request, all items up to its reply, its response's id, and whether the gateway knows them."""

    def __init__(self, body: dict[str, Any], items: list[Any], response: dict[str, Any], *, known: bool) -> None:
        self.body, self.items, self.response, self.known = body, items, response, known


class Player:
    """Nameless callers whose conversations are kept elsewhere."""

    def __init__(self, folder: Path, renderer: TemplateRenderer) -> None:
        self.folder, self.renderer, self.far = folder, renderer, FarResponses()
        self.talks: list[Talk] = []
        self.abroad = 0
        self.gateway = self.opened()

    def opened(self) -> InProcess:
        return InProcess(
            self.folder, self.renderer, self.engine, far=Far([RouteRule("far", "upstream_url")], self.sent)
        )

    def sent(self, path: str, body: bytes) -> Played:
        return self.far.answer(path, body)

    def engine(self, body: bytes) -> Played:
        prompt = orjson.loads(body)["token_ids"]
        ids = self.renderer.tokenizer.encode("Ours.<|im_end|>")
        spans = [{"version": "policy@0", "start": 0, "end": len(ids)}]
        logprobs = {"content": [{"logprob": -0.5}] * len(ids)}
        choice = {"index": 0, "token_ids": ids, "logprobs": logprobs, "finish_reason": "stop", "weight_versions": spans}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        return Played(parts=[orjson.dumps({"choices": [choice], "usage": usage})])

    def calls(self) -> list[tuple[str, dict[str, Any]]]:
        """(trajectory, body) of each."""
        recorded, out = Recorded(), list[tuple[str, dict[str, Any]]]()
        for kept in self.gateway.log.read():
            event = codec.decode_as("Event", kept.entry.value)
            body = recorded.body(event)
            if event["kind"] == "model_call":
                out.append((event["trajectory"], body))
        return out

    async def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = await self.gateway.ask("POST", PATH, orjson.dumps(body))
        assert answer.status == 200, answer
        if not body.get("stream"):
            return dict(answer.json)
        data = [line[6:] for line in answer.body.split(b"\n") if line.startswith(b"data: ")]
        return dict(orjson.loads(data[-1])["response"])

    async def turn(self, which: int, how: str, *, streamed: bool, model: str = "far") -> None:
        former = self.talks[-1 - which % len(self.talks)] if self.talks else None
        said: list[Any] = [{"role": "user", "content": f"turn {len(self.talks)}"}]
        sent, before, more = said, list[Any](), dict[str, Any]()
        if former is not None:
            output = former.response["output"]
            results = [
                {"type": "function_call_output", "call_id": item["call_id"], "output": "7"}
                for item in output
                if item["type"] == "function_call"
            ]
            before, said = [*former.items, *output], [*results, *said]
            sent = [*before, *said]
            if how == "previous":
                sent, more = said, {"previous_response_id": former.response["id"]}
            elif how == "references" and all(item["id"] in self.far.items for item in output):
                sent = [*former.items, *({"type": "item_reference", "id": item["id"]} for item in output), *said]
        body = {"model": model, "input": sent, "stream": streamed, **more}
        known = former is None or sent == [*before, *said] or self.knows(former, how)
        ours = former is not None and "far" not in former.response["id"]
        if model == "far" and ours and how == "previous" and not known:
            return  # forgotten here, and no upstream ever heard of it
        if model != "far" and not known:
            refused = await self.gateway.ask("POST", PATH, orjson.dumps(body))
            assert (refused.status, refused.json["error"]["code"]) == (400, "previous_response_not_found")
            return
        seen = len(self.calls())
        asked = len(self.far.bodies)
        live = set(self.gateway.sessions.live)
        whose = {call["response_id"]: trajectory for trajectory, call in self.calls()}
        response = await self.ask(body)
        ((trajectory, call),) = self.calls()[seen:]
        if former is not None and how == "previous" and self.named(former) and whose[former.response["id"]] in live:
            assert (trajectory, call["identified_by"]) == (whose[former.response["id"]], "response_id")
        if model == "far":
            (raw,) = self.far.bodies[asked:]
            if not ours or how != "previous":
                assert raw == orjson.dumps(body)  # as it came
            else:
                assert "previous_response_id" not in orjson.loads(raw)
        self.talks.append(Talk(body, [*before, *said], response, known=known))

    def named(self, talk: Talk) -> bool:
        """Whether a response is known here, if only whose it is."""
        return talk.response["id"] in self.gateway.sessions.replies.stored._kept

    def knows(self, talk: Talk, how: str) -> bool:
        """Whether all is known that is meant by a response, or by the items of it."""
        kept = self.gateway.sessions.replies.stored._kept.get(talk.response["id"])
        return kept is not None and (how == "references" or kept.conversation() is not None)

    async def again(self, which: int) -> None:
        """A client that did not get its answer asks once more: the former reply is superseded."""
        if not self.talks:
            return
        talk = self.talks[-1 - which % len(self.talks)]
        before = talk.body.get("previous_response_id")
        if before is None or before not in self.gateway.sessions.replies.stored._kept or not talk.known:
            return
        calls = self.calls()
        (trajectory,) = [whose for whose, call in calls if call["response_id"] == before]
        response = await self.ask(talk.body)
        (whose, call) = self.calls()[-1]
        former = [body for whose, body in calls if whose == trajectory and body["request"] == call["request"]]
        if whose == trajectory and former:
            assert (call["supersedes"], call["turn"]) == (former[-1]["response_id"], former[-1]["turn"])
        self.talks.append(Talk(talk.body, talk.items, response, known=talk.known))

    def elsewhere(self, *, streamed: bool) -> None:
        """A conversation goes on here that another gateway has the beginning of."""
        self.abroad += 1
        played = self.far.answer("/responses", orjson.dumps({"input": f"abroad {self.abroad}"}))
        response = orjson.loads(played.parts[0])
        items = [{"role": "user", "content": f"abroad {self.abroad}"}]
        self.talks.append(Talk({"input": items, "stream": streamed}, items, response, known=False))


def plain(messages: Sequence[Any]) -> list[Any]:
    """What is said, without thoughts and the spelling of JSON: where a conversation changes hands they are lost."""
    return [
        (
            message["role"],
            message["content"],
            [(call["id"], orjson.loads(call["function"]["arguments"])) for call in message.get("tool_calls", ())],
        )
        for message in messages
        if message["content"] or message.get("tool_calls")
    ]


async def play(folder: Path, renderer: TemplateRenderer, steps: Sequence[tuple[Any, Any, Any, Any]]) -> None:
    player = Player(folder, renderer)
    for what, which, how, streamed in steps:
        match what:
            case "restart":
                kept = player.gateway.sessions.replies.stored
                await player.gateway.close()
                player.gateway = player.opened()
                assert not player.gateway.sessions.unreadable
                again = player.gateway.sessions.replies.stored
                assert kept._kept.keys() <= again._kept.keys()
                for id, one in kept._kept.items():
                    other = again._kept[id]
                    assert (one.session, one.owner, one.origin, one.conversation()) == (
                        other.session,
                        other.owner,
                        other.origin,
                        other.conversation(),
                    )
            case "forget":
                player.gateway.sessions.replies.stored.sweep(now_micros() + 10**15)
            case "end":
                for session in [*player.gateway.sessions.live.values()]:
                    await player.gateway.gateway.end(session, status="completed", stop_condition="idle")
            case "again":
                await player.again(which)
            case "abroad":
                player.elsewhere(streamed=streamed)
            case _:
                model = "m" if what == "ours" else "far"
                await player.turn(which, how, streamed=streamed, model=model)
    # Whatever happened, the log has what each model read, or says that it has not.
    items = {talk.response["id"]: talk for talk in player.talks}
    for _, call in player.calls():
        talk = items[call["response_id"]]
        assert (call["opened"] == NOT_WHOLE) is not talk.known
        if not talk.known:
            with pytest.raises(Unsayable, match="only its upstream knows"):
                dialogue(call)  # type: ignore[arg-type]
            continue
        truth = RESPONSES.read(orjson.dumps({"input": talk.items}), orjson.loads(call["response"])).messages
        assert plain(read(call["request"], call["response"]).messages) == plain(truth)
        if call["response_id"] in player.far.read:
            was_read = orjson.dumps({"input": player.far.read[call["response_id"]]})
            assert plain(RESPONSES.read(was_read, orjson.loads(call["response"])).messages) == plain(truth)
    await player.gateway.close()


@settings(max_examples=60, deadline=None)
@given(steps=steps)
@example(steps=[("ours", 0, "previous", False), ("turn", 0, "previous", True), ("again", 0, None, None)])
@example(
    steps=[
        ("turn", 0, "previous", True),
        ("turn", 0, "previous", True),
        ("restart", None, None, None),
        ("again", 0, None, None),
    ]
)
@example(steps=[("abroad", None, None, True), ("turn", 0, "previous", True), ("turn", 0, "previous", False)])
def test_the_log_has_what_the_upstreams_model_read(
    renderer: TemplateRenderer, steps: list[tuple[Any, Any, Any, Any]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(play(Path(folder), renderer, steps))
