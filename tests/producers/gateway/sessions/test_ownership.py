"""Whose conversation a call goes on in: never one that somebody else could own, whoever says the same words."""

from __future__ import annotations

import asyncio
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.datastructures import Headers

from millrace.dialects import match_keys
from millrace.dialects.rendering.template import TemplateRenderer
from millrace.infra.log.base import TopicSpec
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.memory.bus import MemoryBus
from millrace.producers.capture.forwarder import Forwarder
from millrace.producers.capture.log import CaptureLog
from millrace.producers.gateway.calls.engine_call import EngineCall
from millrace.producers.gateway.calls.engine_calls import EngineCalls
from millrace.producers.gateway.calls.fleet import Fleet
from millrace.producers.gateway.calls.gateway import Gateway
from millrace.producers.gateway.calls.pipeline import CallPipeline
from millrace.producers.gateway.options import GatewayOptions
from millrace.producers.gateway.sessions.lineage import Lineages
from millrace.producers.gateway.sessions.ownership import NAME_HEADER, NAME_HEADERS, PATH
from millrace.producers.gateway.sessions.recorder import Recorder
from millrace.producers.gateway.sessions.sessions import Sessions
from millrace.schemas import codec
from tests.support.gateway_world import ENGINE, POLICY, ScriptedEngine, World, world
from tests.support.speakers import SPEAKERS, Results, Speaker

HI = {"role": "user", "content": "Hi"}
MORE = {"role": "user", "content": "And then?"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'


def thinking(renderer: TemplateRenderer, visible: str = "Hello") -> ScriptedEngine:
    """Says the same to everybody, behind a thought that it never has twice."""
    count = iter(range(10_000))
    return ScriptedEngine(
        lambda *_: renderer.tokenizer.encode(f"<think>\nthought {next(count)}\n</think>\n\n{visible}<|im_end|>")
    )


@pytest.fixture
async def w(tmp_path: Path, renderer: TemplateRenderer) -> AsyncIterator[World]:
    async with world(tmp_path, renderer, thinking(renderer)) as w:
        yield w


async def say(w: World, messages: list[Any], key: str = "x", headers: dict[str, str] | None = None, **more: Any) -> Any:
    """The assistant message of a reply."""
    answer = await w.http.post(
        "/v1/chat/completions",
        json={"model": "m", "messages": messages, **more},
        headers={"authorization": f"Bearer {key}", **(headers or {})},
    )
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


def without_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name != "reasoning_content"}


def trajectories(w: World) -> list[str]:
    return [event["trajectory"] for event in w.events() if event["kind"] == "model_call"]


def prompt_text(w: World, renderer: TemplateRenderer, at: int) -> str:
    return renderer.tokenizer.decode(w.engine.asked[at].prompt)


# ---------------------------------------------------------------------- nameless callers


@pytest.mark.parametrize("echo", [dict, without_thoughts])
async def test_two_callers_who_were_told_the_same_are_never_mixed(w: World, renderer: TemplateRenderer, echo: Any):
    mine, theirs = await say(w, [HI]), await say(w, [HI])
    assert mine["content"] == theirs["content"]
    await say(w, [HI, echo(mine), MORE])
    await say(w, [HI, echo(theirs), MORE])
    assert "thought 1" not in prompt_text(w, renderer, 2)
    assert "thought 0" not in prompt_text(w, renderer, 3)
    one, two, three, four = trajectories(w)
    assert three != two
    assert four not in (one, three)


async def test_an_owner_that_left_is_still_not_mistaken_for_another(w: World):
    mine = await say(w, [HI])
    (session,) = w.gateway.sessions.live.values()
    await w.gateway.end(session, status="completed", stop_condition="idle")
    await say(w, [HI])
    await say(w, [HI, mine, MORE])
    assert len(set(trajectories(w))) == 3


@pytest.mark.parametrize("named", [{"x-millrace-session": "case"}, {"x-session-id": "case"}, None])
async def test_a_nameless_call_never_takes_over_a_named_or_started_episode(w: World, named: dict[str, str] | None):
    key = "x" if named else (await w.start(group="case-1"))["api_key"]
    reply = await say(w, [HI], key, named)
    await say(w, [HI, reply, MORE])
    first, second = trajectories(w)
    assert first != second
    await say(w, [HI, reply, MORE], key, named)
    assert trajectories(w)[2] == first
    assert w.calls(first)[1]["opened"] is None


async def test_who_began_nameless_or_named_is_known_after_a_restart(tmp_path: Path, renderer: TemplateRenderer):
    name = {"x-millrace-session": "case"}
    async with world(tmp_path, renderer, thinking(renderer)) as w:
        named = await say(w, [HI], headers=name)
        stray = await say(w, [MORE])
        user = await say(w, [{"role": "user", "content": "me"}], user="ann")
    async with world(tmp_path, renderer, thinking(renderer)) as w:
        await say(w, [HI, named, MORE])
        await say(w, [HI, named, MORE], headers=name)
        await say(w, [MORE, stray, HI])
        await say(w, [{"role": "user", "content": "me"}, user, HI])
        await say(w, [{"role": "user", "content": "me"}, without_thoughts(user), HI], user="ann")
        one, two, three, stranger, again, on, other, same = trajectories(w)
        assert (again, on, same) == (one, two, three)
        assert len({one, two, three, stranger, other}) == 5
        assert w.calls(three)[1]["opened"] is None


async def test_a_reply_that_could_not_be_captured_is_still_its_callers(w: World, monkeypatch: pytest.MonkeyPatch):
    def fails(*_: Any) -> Any:
        raise ValueError("no record")

    with monkeypatch.context() as patched:
        patched.setattr(EngineCall, "record", fails)
        mine = without_thoughts(await say(w, [HI]))
    await say(w, [HI])
    await say(w, [HI, mine, MORE])
    assert len(set(trajectories(w))) == 2


async def test_an_episode_whose_calls_a_start_cannot_fold_is_still_its_callers(
    tmp_path: Path, renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
):
    def fails(*_: Any) -> Any:
        raise ValueError("cannot be folded")

    talk = [HI]
    async with world(tmp_path, renderer, thinking(renderer)) as w:
        for _ in range(2):
            talk = [*talk, await say(w, talk), MORE]
    monkeypatch.setattr(Lineages, "apply", fails)
    log = CaptureLog(tmp_path / "capture")
    sessions = Sessions(log.folder, POLICY)
    sessions.rebuild(log)
    log.close()
    (session,) = sessions.live.values()
    assert sessions.unreadable == {session.id}
    digests = match_keys.chain(talk, None)
    assert session.digests == [digests[2], digests[4]]
    found = sessions.replies.owners.find("local", "", talk, digests)
    assert found is not None
    assert found.session is session


# ---------------------------------------------------------------------- end users


@pytest.mark.parametrize("field", ["user", "safety_identifier", "header"])
async def test_end_users_of_one_key_are_apart(w: World, field: str):
    def who(name: str) -> dict[str, Any]:
        return {"headers": {"x-millrace-user": name}} if field == "header" else {field: name}

    replies = {name: without_thoughts(await say(w, [HI], **who(name))) for name in ("ann", "bob")}
    nobody = await say(w, [HI])
    for name, reply in replies.items():
        await say(w, [HI, reply, MORE], **who(name))
    await say(w, [HI, nobody, MORE])
    ann, bob, none, ann2, bob2, none2 = trajectories(w)
    assert (ann2, bob2, none2) == (ann, bob, none)
    assert len({ann, bob, none}) == 3
    assert [w.calls(id)[1]["opened"] for id in (ann, bob)] == [None, None], "a user is told their own thoughts"


async def test_one_name_of_two_end_users_is_two_episodes(w: World):
    name = {"x-millrace-session": "default"}
    await say(w, [HI], headers=name, user="ann")
    await say(w, [HI], headers=name, user="bob")
    await say(w, [HI], headers=name, user="ann")
    one, two, three = trajectories(w)
    assert one == three != two


# ---------------------------------------------------------------------- thoughts


async def test_who_does_not_echo_a_thought_and_proves_nothing_gets_it_in_no_prompt(
    w: World, renderer: TemplateRenderer
):
    reply = await say(w, [HI])
    await say(w, [HI, without_thoughts(reply), MORE])
    assert "thought 0" not in prompt_text(w, renderer, 1)
    assert w.calls()[1]["opened"] == "the caller has no name and did not echo the thoughts"


async def test_who_echoes_the_thought_goes_on_from_it(w: World):
    reply = await say(w, [HI])
    await say(w, [HI, reply, MORE])
    assert w.calls()[1]["opened"] is None


async def test_who_echoes_an_id_of_ours_goes_on(tmp_path: Path, renderer: TemplateRenderer):
    async with world(tmp_path, renderer, thinking(renderer, CALL)) as w:
        reply = without_thoughts(await say(w, [HI], tools=TOOLS))
        result = {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "7"}
        await say(w, [HI, reply, result], tools=TOOLS)
        assert w.calls()[1]["opened"] is None
        assert len(set(trajectories(w))) == 1


def rewritten(reply: dict[str, Any]) -> dict[str, Any]:
    """As frameworks do that write their history anew: other words, other arguments, the same ids."""
    calls = [{**call, "function": {"name": "other", "arguments": '{"a": 1}'}} for call in reply["tool_calls"]]
    return {"role": "assistant", "content": "In other words.", "tool_calls": calls}


def result(reply: dict[str, Any], said: str = "7") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": said}


async def test_an_id_of_ours_says_whose_a_call_is_whatever_became_of_the_words(
    tmp_path: Path, renderer: TemplateRenderer
):
    async with world(tmp_path, renderer, thinking(renderer, CALL)) as w:
        mine, theirs = await say(w, [HI], tools=TOOLS), await say(w, [HI], tools=TOOLS)
        for tools in ({"tools": TOOLS}, {}):
            await say(w, [MORE, rewritten(mine), result(mine)], **tools)
            await say(w, [MORE, result(theirs)], **tools)
        one, two, *rest = trajectories(w)
        assert one != two
        assert rest == [one, two] * 2
        assert w.calls(one)[1]["opened"] is not None, "other words are a lineage of their own"
        both = [MORE, rewritten(mine), result(mine), rewritten(theirs), result(theirs)]
        await say(w, both)
        assert trajectories(w)[-1] not in (one, two), "nobody's, where it could be either's"
        assert len(w.gateway.sessions.live) == 3
    async with world(tmp_path, renderer, thinking(renderer, CALL)) as w:
        await say(w, [MORE, rewritten(theirs), result(theirs)])
        await say(w, [MORE, rewritten(mine), result(mine)], user="ann")
        assert trajectories(w)[-2] == two
        assert trajectories(w)[-1] not in (one, two), "another end user"
        for session in list(w.gateway.sessions.live.values()):
            await w.gateway.end(session, status="completed", stop_condition="idle")
        await say(w, [MORE, rewritten(theirs), result(theirs)])
        assert trajectories(w)[-1] not in (one, two), "its episode is over"


async def test_an_id_of_a_named_episode_takes_nobody_there(tmp_path: Path, renderer: TemplateRenderer):
    async with world(tmp_path, renderer, thinking(renderer, CALL)) as w:
        named = await say(w, [HI], headers={"x-millrace-session": "case"}, tools=TOOLS)
        await say(w, [HI, named, result(named)], tools=TOOLS)
        one, two = trajectories(w)
        assert one != two


# ---------------------------------------------------------------------- what the record says

IN_BODIES = {"messages": {"metadata": {"user_id": '{"session_id": "case of the body"}'}}}


@pytest.mark.parametrize("speaks", SPEAKERS, ids=lambda kind: kind.name)
async def test_the_record_says_what_put_a_call_into_its_episode(
    tmp_path: Path, renderer: TemplateRenderer, speaks: type[Speaker]
):
    count, visible = iter(range(1000)), ["Hello"]
    engine = ScriptedEngine(lambda *_: renderer.tokenizer.encode(f"{next(count)} {visible[0]}<|im_end|>"))
    async with world(tmp_path, renderer, engine) as w:
        speaker = speaks(w)

        async def by(key: str = "x", below: str = "", headers: dict[str, str] | None = None, **more: Any) -> Any:
            sent = {"authorization": f"Bearer {key}", **(headers or {})}
            body = {**speaker.body("hi"), **more}
            answer = await w.http.post(below + speaks.path, json=body, headers=sent)
            assert answer.status_code == 200, answer.text
            return w.calls()[-1]["identified_by"]

        assert await by() == "first"
        assert await by((await w.start())["api_key"], headers={NAME_HEADER: "case"}) == "key"
        for _ in range(2):  # what begins an episode, and what goes on in it
            assert await by(below="/session/a%20path") == "path"
            for header in NAME_HEADERS.keys() - {PATH}:
                assert await by(headers={header: f"case of {header}"}) == f"header:{header}"
            if speaks.name in IN_BODIES:
                assert await by(**IN_BODIES[speaks.name]) == "body:metadata.user_id"
        assert await by(below="/session/a%20path", headers={NAME_HEADER: "case"}) == f"header:{NAME_HEADER}"
        reply = await speaker.say(["hi"], stream=True)
        if speaks.name == "responses":
            assert await by(previous_response_id=reply.id) == "response_id"
        if not speaks.tools:
            return
        await speaker.say(["hi", reply, "and then?"], stream=True)
        assert w.calls()[-1]["identified_by"] == "prefix"
        visible[0] = CALL
        asked = await speaker.say(["hi"], stream=True, tools=["add"])
        await speaker.say(["hi", asked, Results({asked.calls[0][0]: "7"})], stream=True, tools=["add"])
        assert w.calls()[-1]["identified_by"] == "call_id"
        assert not any("case" in str(call["identified_by"]) for call in w.calls()), "never the name"


# ---------------------------------------------------------------------- any interleaving


@dataclass
class Person:
    """A caller that echoes exactly what it was told; `keeps`: whether with the thoughts."""

    name: int
    keeps: bool
    user: str | None
    talk: list[Any] = field(default_factory=list)


PEOPLE = [Person(0, True, None), Person(1, True, None), Person(2, False, None), Person(3, False, "ann")]
Steps = st.lists(
    st.tuples(
        st.sampled_from(range(len(PEOPLE))), st.sampled_from(["Hi", "Ok", "anew", "idle", "restart", "named", "again"])
    ),
    max_size=24,
)


class Stage:
    """A gateway without its sockets, which may be started anew over its folder."""

    def __init__(self, folder: Path, renderer: TemplateRenderer) -> None:
        self.folder = folder
        self.renderer = renderer
        self.engine = thinking(renderer)
        self.open()

    def open(self) -> None:
        self.log = CaptureLog(self.folder)
        sessions = Sessions(self.folder, POLICY)
        sessions.rebuild(self.log)
        fleet = Fleet(POLICY, lambda url: self.engine, (ENGINE,))
        self.gateway = Gateway(GatewayOptions(POLICY), sessions, Recorder(self.log), fleet, self.renderer)

    async def say(self, body: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
        asked = Headers(headers)
        call = await EngineCalls(self.gateway).prepare(self.gateway.callers.identify(asked), asked, orjson.dumps(body))
        message: dict[str, Any] = orjson.loads((await CallPipeline(self.gateway).answer(call)).body)["choices"][0][
            "message"
        ]
        return message


async def play(stage: Stage, steps: list[tuple[int, str]]) -> None:
    people = [Person(person.name, person.keeps, person.user) for person in PEOPLE]
    spoke: list[int] = []
    for who, what in steps:
        person = people[who]
        if what == "anew":
            person.talk = []
        elif what == "idle":
            for session in list(stage.gateway.sessions.live.values())[::2]:
                await stage.gateway.end(session, status="completed", stop_condition="idle")
        elif what == "restart":
            stage.log.close()
            stage.open()
        else:
            if what != "again" or not person.talk:
                person.talk = [*person.talk, {"role": "user", "content": "Hi" if what == "again" else what}]
            elif person.talk[-1]["role"] == "assistant":
                person.talk = person.talk[:-1]
            body = {"model": "m", "messages": person.talk, **({"user": person.user} if person.user else {})}
            headers = {"x-millrace-session": f"of {who}"} if what == "named" else {}
            message = await stage.say(body, headers)
            spoke.append(who)
            person.talk = [*person.talk, message if person.keeps else without_thoughts(message)]
    check(stage, spoke)


def check(stage: Stage, spoke: list[int]) -> None:
    """No episode is of two callers, and no prompt holds what was sampled for another."""
    callers: dict[str, set[int]] = defaultdict(set)
    events = [codec.decode_as("Event", kept.entry.value) for kept in stage.log.read()]
    calls = [event for event in events if event["kind"] == "model_call"]
    for who, event in zip(spoke, calls, strict=True):
        callers[event["trajectory"]].add(who)
    assert all(len(who) == 1 for who in callers.values()), "an episode of two callers"
    for asked, (at, who) in zip(stage.engine.asked, enumerate(spoke), strict=True):
        text = stage.renderer.tokenizer.decode(asked.prompt)
        told = {f"thought {n}\n" for n, other in enumerate(spoke[:at]) if other != who}
        assert not any(thought in text for thought in told), "a thought of another caller"


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(Steps)
def test_no_interleaving_mixes_two_callers(renderer: TemplateRenderer, steps: list[tuple[int, str]]):
    with tempfile.TemporaryDirectory() as folder:
        stage = Stage(Path(folder), renderer)
        try:
            asyncio.run(play(stage, steps))
        finally:
            stage.log.close()


# ---------------------------------------------------------------------- what leaves the folder


async def test_what_a_caller_is_called_stays_in_the_capture_log(w: World):
    await say(w, [HI], headers={"x-millrace-session": "jane.doe"}, user="jane.doe@example.com")
    (started,) = [kept.entry for kept in w.log.read() if kept.entry.headers["kind"] == "episode_started"]
    assert started.headers["_name"] == "jane.doe"
    assert "example.com" not in str(started.headers)
    bus = MemoryBus()
    bus.ensure_topics([TopicSpec("raw", 1)])
    forwarder = Forwarder(w.log, bus, "raw", ClaimStore(str(w.log.folder / "claims")))
    forwarder.start()
    assert await asyncio.to_thread(forwarder.drain, 60)
    await asyncio.to_thread(forwarder.close)
    assert not [name for record in bus.read("raw", 0) for name in record.headers if name.startswith("_")]


async def test_a_name_beyond_its_bound_is_refused(w: World):
    answer = await w.http.post(
        "/v1/chat/completions", json={"model": "m", "messages": [HI]}, headers={"x-millrace-session": "n" * 1025}
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-millrace-session")
    assert not w.events()
