"""Joining a call that was seen on its way to the tool to the model's own: pure, then over HTTP and a restart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.dialects.match_keys import canonical_json
from millrace.dialects.rendering.template import TemplateRenderer
from millrace.infra.engines.upstream import TextUpstream
from millrace.producers.gateway.sessions.tool_asks import SLACK_US, Asks, ToolAsk, match_ask
from millrace.schemas.ids import now_micros
from tests.support.fake_http import answer, serving
from tests.support.gateway_world import ScriptedEngine, World, world

NAMES = st.sampled_from(["add", "fs__add", "list", "fs.list"])
ARGUMENTS = st.sampled_from(['{"a": 1, "b": 2}', '{"b":2,"a":1.0}', '{"a":2}', "{}", "not json"])
TIMES = st.integers(0, 6).map(lambda n: n * SLACK_US)
ASKS = st.lists(
    st.builds(
        lambda id, response, name, arguments, since, until: ToolAsk(
            id, response, name, canonical_json(arguments), since, until
        ),
        st.uuids().map(str),
        st.sampled_from(["r1", "r2"]),
        NAMES,
        ARGUMENTS,
        TIMES,
        st.none() | TIMES,
    ),
    max_size=6,
)
ASK = {"role": "user", "content": "What is 3 + 4?"}


@given(ASKS, NAMES, ARGUMENTS, TIMES, st.randoms())
def test_an_ask_is_named_only_where_it_is_the_one_that_fits(
    asks: list[ToolAsk], name: str, arguments: str, at: int, random: Any
) -> None:
    found = match_ask(asks, name, arguments, at)
    open_then = [
        ask
        for ask in asks
        if ask.since <= at + SLACK_US
        and (ask.until is None or ask.until >= at - SLACK_US)
        and ask.arguments == canonical_json(arguments)
    ]
    exact = [ask for ask in open_then if ask.name == name]
    fitting = exact or [ask for ask in open_then if ask.name in (f"fs__{name}", f"fs.{name}")]
    expected = "absent" if not fitting else "unique" if len(fitting) == 1 else "ambiguous"
    assert found.join == expected
    assert found.ask is (fitting[0] if expected == "unique" else None)
    responses = {ask.response for ask in fitting}
    assert found.response == (responses.pop() if len(responses) == 1 else None)
    shuffled = random.sample(asks, len(asks))
    assert match_ask(shuffled, name, arguments, at) == found


@given(st.lists(st.tuples(st.sampled_from(["f", "g"]), ARGUMENTS), min_size=1, max_size=8))
def test_calls_that_follow_their_asks_turn_by_turn_are_all_joined(turns: list[tuple[str, str]]) -> None:
    asks, messages, at = Asks(), [], 0
    for number, (name, arguments) in enumerate(turns):
        asks.note_call(messages, at := at + 10)
        call = {"id": f"c{number}", "function": {"name": name, "arguments": arguments}}
        asks.note_reply(f"r{number}", {"tool_calls": [call]}, at := at + 10)
        found = asks.join(name, arguments, at := at + 10)
        asks.settle(found.ask)
        assert (found.join, found.response, found.ask and found.ask.id) == ("unique", f"r{number}", f"c{number}")
        messages = [*messages, {"role": "tool", "tool_call_id": f"c{number}", "content": ""}]


@given(st.lists(st.sampled_from(["f", "g"]), min_size=1, max_size=8))
def test_an_ask_is_joined_once(names: list[str]) -> None:
    asks = Asks()
    asks.note_reply("r", {"tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]}, 0)
    found = []
    for name in names:
        found.append(asks.join(name, "{}", 1))
        asks.settle(found[-1].ask)
    assert [one.join for one in found].count("unique") == min(1, names.count("f"))


def test_what_a_superseded_reply_asked_and_what_was_echoed_long_ago_fits_no_more() -> None:
    asks = Asks()
    call = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
    asks.note_reply("lost", {"tool_calls": [call]}, 0)
    asks.note_call([], 5, "lost")
    asks.note_reply("r", {"tool_calls": [call]}, 10)
    assert [ask.response for ask in asks.waiting] == ["r"]
    asks.note_call([{"role": "tool", "tool_call_id": "c", "content": "7"}], 20)
    assert asks.join("f", "{}", 20 + 2 * SLACK_US).join == "absent"
    asks.note_call([], 20 + 2 * SLACK_US)
    assert asks.waiting == []


def engine(renderer: TemplateRenderer, *replies: str) -> ScriptedEngine:
    said = iter(replies)
    return ScriptedEngine(lambda *_: renderer.tokenizer.encode(f"{next(said)}<|im_end|>"))


def asking(*names: str) -> str:
    call = '<tool_call>\n{"name": "NAME", "arguments": {"a": 3, "b": 4}}\n</tool_call>'
    return "".join(call.replace("NAME", name) for name in names)


TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("add", "calc__add")
]


async def tell(w: World, session: dict[str, str], *events: dict[str, Any], **more: Any) -> Any:
    path = f"/v1/sessions/{session['session']}/events"
    headers = {"authorization": f"Bearer {session['api_key']}"}
    return await w.http.post(path, json={"events": list(events), **more}, headers=headers)


def seen(call_id: str = "mcp-1", **more: Any) -> dict[str, Any]:
    arguments = '{"b":4,"a":3}'
    return {"kind": "tool_call", "call_id": call_id, "name": "add", "arguments": arguments, "join": True, **more}


def tool_calls(w: World, session: dict[str, str]) -> list[dict[str, Any]]:
    return [event["data"] for event in w.events(session["session"]) if event["kind"] == "tool_call"]


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_call_is_joined_to_the_reply_that_asked_for_it(
    tmp_path: Path, renderer: TemplateRenderer, restarted: bool
) -> None:
    async with world(tmp_path, renderer, engine(renderer, asking("calc__add"))) as w:
        session = await w.start()
        answer = (await w.chat([ASK], session["api_key"], tools=TOOLS)).json()
        if not restarted:
            assert (await tell(w, session, seen(server="calc", traceparent="00-a-b-01"), seen("mcp-2"))).is_success
    async with world(tmp_path, renderer, engine(renderer, asking("add"))) as w:
        if restarted:
            assert (await tell(w, session, seen(server="calc", traceparent="00-a-b-01"), seen("mcp-2"))).is_success
        one, two = tool_calls(w, session)
        (asked,) = answer["choices"][0]["message"]["tool_calls"]
        assert (one["join"], one["asked_id"], one["response_id"]) == ("unique", asked["id"], answer["id"])
        assert (one["call_id"], one["server"], one["traceparent"]) == ("mcp-1", "calc", "00-a-b-01")
        assert one["arguments"] == '{"b":4,"a":3}'
        assert (two["join"], two["asked_id"], two["response_id"]) == ("absent", None, None)
        # A start knows what was joined before it.
        assert (await tell(w, session, seen("mcp-3"))).is_success
        assert tool_calls(w, session)[-1]["join"] == "absent"


async def test_a_reply_of_a_text_only_upstream_is_joined_too(tmp_path: Path) -> None:
    call = {"id": "call_9", "type": "function", "function": {"name": "add", "arguments": '{ "a": 3, "b": 4.0 }'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    said = {"id": "up-1", "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}
    async with serving(answer(json.dumps(said).encode())) as server:
        upstream = TextUpstream(f"{server.url}/v1", "sk-upstream")
        async with world(tmp_path, None, None, upstream=upstream) as w:
            session = await w.start()
            assert (await w.chat([ASK], session["api_key"], tools=TOOLS)).is_success
            await tell(w, session, seen())
            (found,) = tool_calls(w, session)
            assert (found["join"], found["asked_id"], found["response_id"]) == ("unique", "call_9", "up-1")
        await upstream.close()


async def test_two_that_fit_are_not_told_apart(tmp_path: Path, renderer: TemplateRenderer) -> None:
    async with world(tmp_path, renderer, engine(renderer, asking("add", "add"))) as w:
        session = await w.start()
        answer = (await w.chat([ASK], session["api_key"], tools=TOOLS)).json()
        await tell(w, session, seen("mcp-1"), seen("mcp-2"))
        for call in tool_calls(w, session):
            assert (call["join"], call["asked_id"], call["response_id"]) == ("ambiguous", None, answer["id"])


async def test_a_report_may_be_sent_until_it_is_answered(tmp_path: Path, renderer: TemplateRenderer) -> None:
    def numbered(*seqs: int) -> list[dict[str, Any]]:
        return [{"kind": "observation", "content": str(seq), "seq": seq} for seq in seqs]

    def contents(w: World) -> list[str]:
        return [event["data"]["content"] for event in w.events() if event["kind"] == "observation"]

    async with world(tmp_path, renderer, engine(renderer)) as w:
        session = await w.start()
        assert (await tell(w, session, *numbered(0, 1, 4), source="a b")).is_success
        ids = (await tell(w, session, *numbered(1, 4, 5), source="a b")).json()["ids"]
        assert [id is None for id in ids] == [True, True, False]
        assert contents(w) == ["0", "1", "4", "5"]
    async with world(tmp_path, renderer, engine(renderer)) as w:
        assert (await tell(w, session, *numbered(4, 5, 6), source="a b")).is_success
        assert (await tell(w, session, *numbered(0), source="other")).is_success
        assert contents(w) == ["0", "1", "4", "5", "6", "0"]


async def test_a_report_that_a_full_log_refuses_is_recorded_when_it_comes_again(
    tmp_path: Path, renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From where it broke off, and each call is joined as if nothing had been."""
    async with world(tmp_path, renderer, engine(renderer, asking("add"))) as w:
        session = await w.start()
        asked = (await w.chat([ASK], session["api_key"], tools=TOOLS)).json()["choices"][0]["message"]["tool_calls"]
        events = [{"kind": "observation", "content": "x", "seq": 0}, {**seen(), "seq": 1}]
        room, accept = w.log.max_waiting, w.gateway.recorder.accept

        def full_for_calls(of: Any, kind: str, *body: Any, **more: Any) -> str | None:
            w.log.max_waiting = 0 if kind == "tool_call" else room
            return accept(of, kind, *body, **more)

        monkeypatch.setattr(w.gateway.recorder, "accept", full_for_calls)
        for _ in range(2):
            refused = await tell(w, session, *events, source="s")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "log_full")
        monkeypatch.undo()
        w.log.max_waiting = room
        ids = (await tell(w, session, *events, source="s")).json()["ids"]
        assert [id is None for id in ids] == [True, False]
        kinds = [event["kind"] for event in w.events()]
        assert kinds == ["episode_started", "model_call", "observation", "tool_call"]
        (call,) = tool_calls(w, session)
        assert (call["join"], call["asked_id"]) == ("unique", asked[0]["id"])


@pytest.mark.parametrize(
    ("events", "more"),
    [
        ([{"seq": 1}], {}),
        ([{}], {"source": "a"}),
        ([{"seq": 2}, {"seq": 2}], {"source": "a"}),
        ([{"seq": 2}, {"seq": 1}], {"source": "a"}),
        ([{"seq": -1}], {"source": "a"}),
        ([{"seq": 1}], {"source": ""}),
        ([{"event_time": -1}], {}),
    ],
)
async def test_numbers_that_say_nothing_are_refused(
    tmp_path: Path, renderer: TemplateRenderer, events: list[dict[str, Any]], more: dict[str, str]
) -> None:
    async with world(tmp_path, renderer, engine(renderer)) as w:
        session = await w.start()
        whole = [{"kind": "observation", "content": "x", **event} for event in events]
        assert (await tell(w, session, *whole, **more)).status_code == 400
        assert [event["kind"] for event in w.events()] == ["episode_started"]


async def test_an_event_may_say_when_it_happened(tmp_path: Path, renderer: TemplateRenderer) -> None:
    async with world(tmp_path, renderer, engine(renderer)) as w:
        session = await w.start()
        await tell(w, session, {"kind": "observation", "content": "x", "event_time": 17})
        await tell(w, session, {"kind": "observation", "content": "y"})
        early, late = [event for event in w.events() if event["kind"] == "observation"]
        assert early["event_time"] == 17
        assert abs(late["event_time"] - now_micros()) < 60_000_000
