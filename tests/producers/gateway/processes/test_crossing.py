"""Two processes of one gateway, each behind a door of its own: through either door a conversation is the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from yarl import URL

from millrace.dialects.rendering.template import TemplateRenderer
from millrace.infra.gateway_processes import is_drained, mark_drain
from millrace.producers.gateway import serve as serve_module
from millrace.producers.gateway.marks import index_of
from millrace.producers.gateway.prices import Prices
from millrace.producers.gateway.processes.owner import ProcessLayout, choose_process
from millrace.producers.gateway.sessions.ownership import TRAJECTORY_HEADER
from millrace.producers.gateway.spending import KeyLimits
from millrace.producers.gateway.upstreams.routes import RouteRule
from millrace.producers.gateway.upstreams.upstreams import Upstream, Upstreams
from millrace.schemas.ids import now_micros
from tests.producers.gateway.far_responses import FarResponses
from tests.support.gateway_world import ScriptedEngine, World, world
from tests.support.in_process import PlayedUpstream

USER = {"role": "user", "content": "What is 3 + 4?"}
MORE = {"role": "user", "content": "And then?"}
CALL = 'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
KEYS = {"sk-a-of-a-tenant": "a", "sk-b-of-another": "b"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def engine_of(renderer: TemplateRenderer) -> ScriptedEngine:
    engine = ScriptedEngine(lambda *_: renderer.tokenizer.encode(engine.says + "<|im_end|>"))
    engine.says = "Seven."
    return engine


@asynccontextmanager
async def processes(
    folder: Path, renderer: TemplateRenderer, count: int = 2, former: tuple[int, ...] = (), **options: Any
) -> AsyncIterator[list[World]]:
    """All processes of a gateway, with those that are retired."""
    engine = engine_of(renderer)
    async with AsyncExitStack() as held:
        most = max((count, *former))
        layouts = [ProcessLayout(index, count, former) for index in range(most)]
        yield [
            await held.enter_async_context(
                world(folder, renderer, engine, layout=layout, patience_s=5.0, **{"keys": KEYS, **options})
            )
            for layout in layouts
        ]


@pytest.fixture
async def both(tmp_path: Path, renderer: TemplateRenderer) -> AsyncIterator[list[World]]:
    async with processes(tmp_path, renderer) as both:
        yield both


async def post(w: World, path: str, body: Any, key: str = "sk-a-of-a-tenant", **headers: str) -> httpx.Response:
    sent = {"authorization": f"Bearer {key}", **{name.replace("_", "-"): value for name, value in headers.items()}}
    return await w.http.post(path, json=body, headers=sent)


async def chat(w: World, messages: Any, key: str = "sk-a-of-a-tenant", **headers: str) -> httpx.Response:
    answer = await post(w, "/v1/chat/completions", {"model": "m", "messages": messages, "tools": TOOLS}, key, **headers)
    assert answer.status_code == 200, answer.text
    return answer


def sessions(both: list[World]) -> dict[str, int]:
    """Calls of each session over the logs of all; a session is in one log."""
    out: dict[str, int] = {}
    for w in both:
        for event in w.events():
            if event["kind"] == "episode_started":
                assert event["trajectory"] not in out
                out[event["trajectory"]] = 0
            if event["kind"] == "model_call":
                out[event["trajectory"]] += 1
    return out


@pytest.mark.parametrize("name", ["chat-1", "chat-2", "chat-3", "Zürich/7", "019a0000-0000-7000-8000-000000000000"])
async def test_a_named_conversation_is_one_session_through_any_door(both: list[World], name: str) -> None:
    value = name.encode().decode("latin-1")
    told = set()
    for at in range(4):
        answer = await both[at % 2].http.post(
            "/v1/chat/completions",
            json={"model": "m", "messages": [USER]},
            headers=[(b"authorization", b"Bearer sk-a-of-a-tenant"), (b"x-session-id", value.encode("latin-1"))],
        )
        told.add(answer.headers[TRAJECTORY_HEADER])
    (id,) = told
    assert sum(count for count in sessions(both).values()) == sessions(both)[id]
    assert index_of(id) == choose_process(f"name {name}", 2)
    for w in both:
        found = await w.http.get("/v1/sessions", params={"name": name}, headers={"x-api-key": "sk-a-of-a-tenant"})
        assert found.json() == {"sessions": [{"session": id, "live": True}]}
        other = await w.http.get("/v1/sessions", params={"name": name}, headers={"x-api-key": "sk-b-of-another"})
        assert other.json() == {"sessions": []}


async def test_a_path_and_a_body_name_a_conversation_through_any_door(both: list[World]) -> None:
    user = json.dumps({"session_id": "s 1"})
    body = {"model": "m", "max_tokens": 20, "messages": [USER], "metadata": {"user_id": user}}
    answers = [await post(w, "/v1/messages", body) for w in both]
    answers += [await post(w, "/session/s%201/v1/chat/completions", {"model": "m", "messages": [USER]}) for w in both]
    assert len({answer.headers[TRAJECTORY_HEADER] for answer in answers}) == 1
    by = {call["identified_by"] for w in both for call in w.calls()}
    assert by == {"body:metadata.user_id", "path"}


async def test_a_started_session_takes_everything_through_any_door(both: list[World]) -> None:
    for w, other in (both, both[::-1]):
        started = (await post(w, "/v1/sessions", {"attempt": "a-1", "awaits": ["user"]})).json()
        again = (await post(other, "/v1/sessions", {"attempt": "a-1", "awaits": ["user"]})).json()
        assert again["session"] == started["session"], "a start that is repeated is no second session"
        id, key = started["session"], started["api_key"]
        for door in both:
            await chat(door, [USER], key)
            await chat(door, [USER], x_millrace_session=id)
            given = await post(door, f"/v1/sessions/{id}/reward", {"value": 1.0, "reward_id": "r", "source": "user"})
            assert given.json() == {"reward_id": "r"}
            report = {"source": "s", "events": [{"kind": "observation", "content": "x", "seq": 1}]}
            assert (await post(door, f"/v1/sessions/{id}/events", report, key)).status_code == 200
            child = (await post(door, "/v1/sessions", {"parent": id})).json()["session"]
            assert (await post(door, f"/v1/sessions/{child}/end", {})).json()["ended"]
            foreign = await post(door, f"/v1/sessions/{id}/reward", {"value": 1.0, "source": "user"}, "sk-b-of-another")
            assert (foreign.status_code, foreign.json()["error"]["code"]) == (404, "session_not_found")
        assert (await post(other, f"/v1/sessions/{id}/end", {})).json() == {"session": id, "ended": True}
        ended = [await post(door, "/v1/chat/completions", {"model": "m", "messages": [USER]}, key) for door in both]
        assert [answer.json()["error"]["code"] for answer in ended] == ["session_ended"] * 2
        kinds = [event["kind"] for w in both for event in w.events(id)]
        assert (kinds.count("model_call"), kinds.count("reward"), kinds.count("observation")) == (4, 1, 1)
        steps = [event["step"] for w in both for event in w.events(id)]
        assert steps == list(range(len(steps)))


@pytest.mark.parametrize("at", range(4))
async def test_a_nameless_conversation_goes_on_through_any_door_and_in_any_api(both: list[World], at: int) -> None:
    asked: list[dict[str, Any]] = [{"role": "user", "content": f"{at}: what is 3 + 4?"}]
    told = set()
    for turn in range(4):
        answer = await post(both[(turn + at) % 2], "/v1/chat/completions", {"model": "m", "messages": asked})
        told.add(answer.headers[TRAJECTORY_HEADER])
        asked += [answer.json()["choices"][0]["message"], {"role": "user", "content": f"more {turn}"}]
    for door in both:
        answer = await post(door, "/v1/messages", {"model": "m", "max_tokens": 9, "messages": asked})
        told.add(answer.headers[TRAJECTORY_HEADER])
        asked += [{"role": "assistant", "content": answer.json()["content"]}, MORE]
    assert len(told) == 1
    assert list(sessions(both).values()) == [6]
    assert {call["lineage"] for w in both for call in w.calls()}.__len__() == 1, "on the same tokens"


async def test_the_ids_of_calls_lead_back_whatever_became_of_the_words(both: list[World]) -> None:
    both[0].engine.says = CALL
    for at in range(4):
        first = await chat(both[0], [{"role": "user", "content": f"{at}"}])
        reply = first.json()["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "7"}
        for door in both:
            trimmed = [{"role": "user", "content": f"in other words {at}"}, {**reply, "content": "Hm."}, result]
            assert (await chat(door, trimmed)).headers[TRAJECTORY_HEADER] == first.headers[TRAJECTORY_HEADER]
            foreign = await chat(door, trimmed, "sk-b-of-another")
            assert foreign.headers[TRAJECTORY_HEADER] != first.headers[TRAJECTORY_HEADER]


async def test_ids_of_a_session_that_is_over_begin_one_where_the_head_leads(both: list[World]) -> None:
    both[0].engine.says = CALL
    seen = set()
    for at in range(6):
        named = await chat(both[0], [USER], x_session_id=f"n-{at}")
        reply = named.json()["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "7"}
        asked = [{"role": "user", "content": f"{at}"}, reply, result]
        first, second = [await chat(door, asked) for door in both]
        assert named.headers[TRAJECTORY_HEADER] != first.headers[TRAJECTORY_HEADER]
        seen.add(index_of(first.headers[TRAJECTORY_HEADER]))
        again = [*asked, second.json()["choices"][0]["message"]]
        answered = {"role": "tool", "tool_call_id": again[-1]["tool_calls"][0]["id"], "content": "8"}
        third = await chat(both[at % 2], [*again, answered])
        assert third.headers[TRAJECTORY_HEADER] == second.headers[TRAJECTORY_HEADER]
    assert seen == {0, 1}


async def test_a_stored_response_is_known_through_any_door_to_its_caller(both: list[World]) -> None:
    for at in range(4):
        body = {"model": "m", "input": f"{at}"}
        first = await post(both[at % 2], "/v1/responses", body)
        for door in both:
            id = first.json()["id"]
            more = {"model": "m", "input": "more", "previous_response_id": id}
            assert (await post(door, "/v1/responses", more)).headers[TRAJECTORY_HEADER] == first.headers[
                TRAJECTORY_HEADER
            ]
            item = {"type": "item_reference", "id": first.json()["output"][0]["id"]}
            asked = [{"role": "user", "content": f"{at}"}, item, MORE]
            assert (await post(door, "/v1/responses", {"model": "m", "input": asked})).headers[
                TRAJECTORY_HEADER
            ] == first.headers[TRAJECTORY_HEADER]
            mine = await door.http.get(f"/v1/responses/{id}", headers={"x-api-key": "sk-a-of-a-tenant"})
            assert mine.json() == first.json()
            other = await door.http.get(f"/v1/responses/{id}", headers={"x-api-key": "sk-b-of-another"})
            assert other.status_code == 404
            refused = await post(door, "/v1/responses", more, "sk-b-of-another")
            assert refused.json()["error"]["code"] == "previous_response_not_found"
            rated = await post(door, "/v1/feedback", {"response_id": id, "rating": 1.0})
            assert rated.json()["session"] == first.headers[TRAJECTORY_HEADER]
            assert (await post(door, "/v1/feedback", {"response_id": id}, "sk-b-of-another")).status_code in (400, 404)
            listed = await door.http.get(f"/v1/responses/{id}/input_items", headers={"x-api-key": "sk-a-of-a-tenant"})
            assert listed.json()["data"][0]["content"][0]["text"] == f"{at}"
        gone = await both[0].http.delete(f"/v1/responses/{id}", headers={"x-api-key": "sk-a-of-a-tenant"})
        assert gone.json()["deleted"]
        for door in both:
            mine = await door.http.get(f"/v1/responses/{id}", headers={"x-api-key": "sk-a-of-a-tenant"})
            assert mine.status_code == 404


async def test_feedback_takes_a_name_and_an_id_of_nobody(both: list[World]) -> None:
    for at in range(4):
        named = await chat(both[0], [USER], x_session_id=f"n-{at}")
        for door in both:
            given = await post(door, "/v1/feedback", {"session": f"n-{at}", "rating": 1.0})
            assert given.json()["session"] == named.headers[TRAJECTORY_HEADER]
            by_name = await post(door, f"/v1/sessions/n-{at}/reward", {"value": 1.0, "source": "user"})
            assert by_name.status_code == 200
            unknown = await post(door, "/v1/feedback", {"response_id": "chatcmpl-of-nobody", "rating": 1.0})
            assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "reply_not_found")


def names_of(index: int, count: int = 2) -> str:
    """A name that this process holds."""
    return next(f"n-{at}" for at in range(100) if choose_process(f"name n-{at}", count) == index)


async def test_a_stream_comes_through_the_other_door_byte_for_byte(both: list[World]) -> None:
    both[0].engine.says = CALL
    shapes = []
    for door in both:
        body = {"model": "m", "messages": [USER], "tools": TOOLS, "stream": True}
        answer = await post(door, "/v1/chat/completions", body, x_session_id=names_of(1))
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        shapes.append((sorted(answer.headers), [list(event) for event in events], answer.text[-14:]))
    assert shapes[0] == shapes[1]
    assert "text/event-stream" in answer.headers["content-type"]


async def test_a_client_that_leaves_ends_its_call_behind_the_other_door(both: list[World]) -> None:
    both[0].engine.says, both[0].engine.gate = "One two three four.", asyncio.Semaphore(2)
    body = {"model": "m", "messages": [USER], "stream": True}
    sent = {"authorization": "Bearer sk-a-of-a-tenant", "x-session-id": names_of(1)}
    async with both[0].http.stream("POST", "/v1/chat/completions", json=body, headers=sent) as answer:
        await anext(answer.aiter_raw())
    async with asyncio.timeout(30):
        while not both[1].calls():
            await asyncio.sleep(0.01)
    (call,) = both[1].calls()
    assert call["finish_reason"] == "abort"
    assert both[0].engine.left_early == 1


async def test_a_plain_call_is_given_up_behind_the_other_door_too(both: list[World]) -> None:
    both[0].engine.gate = asyncio.Semaphore(0)
    with pytest.raises(httpx.ReadTimeout):
        await both[0].http.post(
            "/v1/chat/completions",
            json={"model": "m", "messages": [USER]},
            headers={"authorization": "Bearer sk-a-of-a-tenant", "x-session-id": names_of(1)},
            timeout=0.5,
        )
    async with asyncio.timeout(30):
        while both[0].engine.left_early != 1:
            await asyncio.sleep(0.01)


async def test_frames_of_a_socket_go_to_whoever_holds_their_conversation(both: list[World]) -> None:
    started = (await post(both[1], "/v1/sessions", {})).json()
    assert index_of(started["session"]) == 1
    first = (await post(both[0], "/v1/responses", {"model": "m", "input": "a"})).json()
    async with aiohttp.ClientSession() as http:

        async def said(door: World, path: str, key: str, *frames: dict[str, Any]) -> list[dict[str, Any]]:
            out = []
            sent = {"authorization": f"Bearer {key}"}
            async with http.ws_connect(f"{door.url}{path}", headers=sent) as socket, asyncio.timeout(60):
                for frame in frames:
                    await socket.send_json({"type": "response.create", "model": "m", **frame})
                    event: dict[str, Any] = {"type": ""}
                    while event["type"] not in ("response.completed", "error"):
                        event = await socket.receive_json()
                    out.append(event)
            return out

        for door in both:
            (own,) = await said(door, "/v1/responses", started["api_key"], {"input": "hi"})
            assert own["response"]["output"][0]["content"][0]["text"] == "Seven."
            more, wrong, named = await said(
                door,
                f"/session/{names_of(1)}/v1/responses" if door is both[1] else "/v1/responses",
                "sk-a-of-a-tenant",
                {"input": "more", **({} if door is both[1] else {"previous_response_id": first["id"]})},
                {"input": "more", "previous_response_id": "resp_nobody"},
                {"input": "hi"},
            )
            assert (more["type"], named["type"]) == ("response.completed", "response.completed")
            assert (wrong["status"], wrong["error"]["code"]) == (400, "previous_response_not_found")
            (path,) = await said(door, f"/session/{names_of(1)}/v1/responses", "sk-a-of-a-tenant", {"input": "x"})
            assert path["type"] == "response.completed"
    calls = sessions(both)
    assert calls[started["session"]] == 2
    held = await both[0].http.get(
        "/v1/sessions", params={"name": names_of(1)}, headers={"x-api-key": "sk-a-of-a-tenant"}
    )
    (one,) = held.json()["sessions"]
    assert calls[one["session"]] == 4


async def test_no_client_speaks_as_a_process(both: list[World]) -> None:
    """Its header of that name goes no further than the door, and asks for nothing there."""
    for word in ("held", "any", "spending"):
        for door in both:
            for key in ("sk-a-of-a-tenant", (await post(both[1], "/v1/sessions", {})).json()["api_key"]):
                answer = await chat(door, [USER], key, x_millrace_hop=word)
                assert answer.json()["object"] == "chat.completion"
    assert (both[0].gateway.sessions.index, len(both[0].gateway.sessions.live)) == (
        0,
        both[0].gateway.sessions.count["a"],
    )


async def test_who_sends_is_known_before_a_body_is_read(both: list[World]) -> None:
    for door in both:
        for key in ("sk-of-nobody", "mr-of-nobody.x"):
            answer = await post(
                door, "/v1/chat/completions", {"model": "m", "messages": [USER]}, key, x_session_id="n-1"
            )
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")


async def test_a_body_has_its_bounds_behind_either_door(tmp_path: Path, renderer: TemplateRenderer) -> None:
    async with processes(tmp_path, renderer, max_body_bytes=300) as both:
        for door in both:
            for name in (names_of(0), names_of(1)):
                long = {"model": "m", "messages": [{"role": "user", "content": "x" * 400}]}
                answer = await post(door, "/v1/messages", long, x_session_id=name)
                assert (answer.status_code, answer.json()["type"]) == (413, "error")


async def test_a_process_that_is_gone_is_said_in_the_shape_of_each_api(
    tmp_path: Path, renderer: TemplateRenderer
) -> None:
    async with world(
        tmp_path, renderer, engine_of(renderer), layout=ProcessLayout(0, 2), keys=KEYS, patience_s=5.0
    ) as alone:
        name = names_of(1)
        for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
            body = {"model": "m", "messages": [USER], "input": "x", "max_tokens": 9}
            answer = await post(alone, path, body, x_session_id=name)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1"), answer.text
            assert "starts again" in answer.json()["error"]["message"]
        assert (await chat(alone, [USER], x_session_id=names_of(0))).status_code == 200
        assert (await alone.http.get("/health")).json()["status"] == "ok"


async def test_sessions_outlive_a_change_of_the_number(tmp_path: Path, renderer: TemplateRenderer) -> None:
    """From one to three, to one, to two: what is live goes on where it began, and what begins is found."""
    seen: dict[str, str] = {}
    asked: dict[str, list[Any]] = {}
    started: dict[str, str] = {}
    counts = (1, 3, 1, 2)
    for at, count in enumerate(counts):
        former = tuple(dict.fromkeys(one for one in reversed(counts[:at]) if one != count))
        async with processes(tmp_path, renderer, count, former) as all:
            doors = all[:count]
            for turn, (name, id) in enumerate(seen.items()):
                door = doors[turn % count]
                assert (await chat(door, [USER], x_session_id=name)).headers[TRAJECTORY_HEADER] == id
                given = await post(door, f"/v1/sessions/{name}/reward", {"value": 1.0, "source": "user"})
                assert given.status_code == 200
                found = await door.http.get("/v1/sessions?name=" + name, headers={"x-api-key": "sk-a-of-a-tenant"})
                assert found.json() == {"sessions": [{"session": id, "live": True}]}
            for turn, (id, messages) in enumerate(asked.items()):
                answer = await chat(doors[turn % count], messages)
                assert answer.headers[TRAJECTORY_HEADER] == id
                messages += [answer.json()["choices"][0]["message"], MORE]
            for turn, (id, key) in enumerate(started.items()):
                assert (await chat(doors[turn % count], [USER], key)).headers[TRAJECTORY_HEADER] == id
            for turn in range(5):
                door, name = doors[turn % count], f"{at}.{turn}"
                seen[name] = (await chat(door, [USER], x_session_id=name)).headers[TRAJECTORY_HEADER]
                begun = [{"role": "user", "content": f"{at} {turn}"}]
                answer = await chat(door, begun)
                asked[answer.headers[TRAJECTORY_HEADER]] = [*begun, answer.json()["choices"][0]["message"], MORE]
                fresh = (await post(door, "/v1/sessions", {})).json()
                started[fresh["session"]] = fresh["api_key"]
            assert all[0].gateway.sessions.live
            assert sessions(all).keys() == {*seen.values(), *asked, *started}
    assert {index_of(id) for id in (*seen.values(), *asked, *started)} == {0, 1, 2}


async def test_who_is_retired_begins_nothing(tmp_path: Path, renderer: TemplateRenderer) -> None:
    async with processes(tmp_path, renderer, 2) as both:
        name = names_of(1)
        id = (await chat(both[0], [USER], x_session_id=name)).headers[TRAJECTORY_HEADER]
        assert index_of(id) == 1
        kept = (await post(both[1], "/v1/responses", {"model": "m", "input": "a"}, x_session_id=name)).json()["id"]
    async with processes(tmp_path, renderer, 1, (2,)) as both:
        assert (await chat(both[0], [USER], x_session_id=name)).headers[TRAJECTORY_HEADER] == id
        assert (await post(both[0], f"/v1/sessions/{id}/end", {})).json()["ended"]
        late = await post(both[0], f"/v1/sessions/{name}/reward", {"value": 1.0, "source": "user"})
        assert late.status_code == 200
        again = (await chat(both[0], [USER], x_session_id=name)).headers[TRAJECTORY_HEADER]
        assert index_of(again) == 0
        assert not both[1].gateway.sessions.live
        refused = await post(both[0], "/v1/responses", {"model": "m", "input": "b", "previous_response_id": kept})
        assert refused.json()["error"]["code"] == "previous_response_not_found"
    async with world(
        tmp_path, renderer, engine_of(renderer), layout=ProcessLayout(0, 1, (2,)), keys=KEYS, patience_s=5.0
    ) as w:
        body = {"model": "m", "messages": [USER]}
        for asked in (
            await post(w, "/v1/chat/completions", body, x_session_id=name),
            await post(w, f"/v1/sessions/{id}/reward", {"value": 1.0, "source": "user"}),
        ):
            assert (asked.status_code, asked.json()["error"]["code"]) == (503, "process_down"), "it is only down"
    mark_drain(tmp_path / "capture", 1, is_drained=True)
    # It has left: its ids are those of nobody.
    async with world(
        tmp_path, renderer, engine_of(renderer), layout=ProcessLayout(0, 1, (2,)), keys=KEYS, patience_s=5.0
    ) as w:
        assert (await chat(w, [USER], x_session_id=name)).headers[TRAJECTORY_HEADER] == again
        unknown = await post(w, f"/v1/sessions/{id}/reward", {"value": 1.0, "source": "user"})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "session_not_found")


async def test_who_is_retired_ends_once_nothing_of_it_is_live(tmp_path: Path, renderer: TemplateRenderer) -> None:
    async with processes(tmp_path, renderer, 2) as both:
        ids = [
            (await chat(both[0], [USER], x_session_id=names_of(index))).headers[TRAJECTORY_HEADER] for index in range(2)
        ]
    async with processes(tmp_path, renderer, 1, (2,), reward_deadline_ms=0) as both:
        assert not is_drained(tmp_path / "capture", 1)
        for id in ids:
            assert (await post(both[0], f"/v1/sessions/{id}/end", {})).json()["ended"]
        async with asyncio.timeout(60):
            while not is_drained(tmp_path / "capture", 1):
                await asyncio.sleep(0.05)
        assert not both[1].log.waiting
        again = (await chat(both[0], [USER], x_session_id=names_of(1))).headers[TRAJECTORY_HEADER]
        assert index_of(again) == 0


async def test_what_a_key_may_spend_counts_over_all(tmp_path: Path, renderer: TemplateRenderer) -> None:
    limits = {"a": KeyLimits(budget=1.0, budget_hours=1e6)}
    names = {"sk-a-of-a-tenant": "a", "sk-b-of-another": "b"}
    prices = Prices(prompt=1e6, completion=1e6, cached_prompt=1e6)
    async with processes(tmp_path, renderer, limits=limits, key_names=names, prices=prices) as both:
        await chat(both[0], [USER], x_session_id=names_of(0))
        there = both[1].gateway.recorder.spending
        async with asyncio.timeout(60):
            while not there.used("a", now_micros()).money:
                await asyncio.sleep(0.01)
        assert there.standing()["a"][1] == 0, "all of it was spent at the other"
        for door in both:
            body = {"model": "m", "messages": [USER]}
            answer = await post(door, "/v1/chat/completions", body, x_session_id=names_of(1))
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "budget_spent")
        assert (await chat(both[1], [USER], "sk-b-of-another")).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_process_that_stops_breaks_off_what_another_answers(
    tmp_path: Path, renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(serve_module, "DRAIN_S", 0.2)
    engine = engine_of(renderer)
    engine.says, engine.gate = "One two three four.", asyncio.Semaphore(2)
    common = {"keys": KEYS, "patience_s": 5.0}
    async with world(tmp_path, renderer, engine, layout=ProcessLayout(1, 2), **common) as other:
        async with AsyncExitStack() as first, httpx.AsyncClient(timeout=60) as http:
            door = await first.enter_async_context(
                world(tmp_path, renderer, engine, layout=ProcessLayout(0, 2), **common)
            )
            calling = asyncio.create_task(
                http.post(
                    f"{door.url}/v1/messages",
                    json={"model": "m", "max_tokens": 50, "messages": [USER], "stream": stream},
                    headers={"x-api-key": "sk-a-of-a-tenant", "x-session-id": names_of(1)},
                )
            )
            async with asyncio.timeout(60):
                while not engine.asked:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.1)
                await first.aclose()
                answer = await calling
        if stream:
            (said,) = [line for line in answer.text.splitlines() if "went away" in line]
            assert answer.text.rstrip().endswith(said)
        else:
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        async with asyncio.timeout(60):
            while not other.calls():
                await asyncio.sleep(0.01)
        assert other.calls()[0]["finish_reason"] == "abort"


def far_upstreams() -> tuple[FarResponses, Upstreams]:
    """An upstream that keeps its responses, and gives them to whoever asks by the gateway's key."""
    far = FarResponses()
    client = PlayedUpstream("http://far.test/v1")
    client.script = far.answer
    return far, Upstreams([Upstream("far", client, frozenset({"responses"}))], [RouteRule("far", "far")])


async def test_what_an_upstream_keeps_is_its_callers_through_any_door(
    tmp_path: Path, renderer: TemplateRenderer
) -> None:
    far, upstreams = far_upstreams()
    async with processes(tmp_path, renderer, upstream=upstreams) as both:
        for at in range(4):
            first = await post(both[at % 2], "/v1/responses", {"model": "far", "input": f"{at}"})
            id, item = first.json()["id"], first.json()["output"][0]["id"]
            for door in both:
                more = {"model": "far", "input": "more", "previous_response_id": id}
                assert (await post(door, "/v1/responses", more)).headers[TRAJECTORY_HEADER] == first.headers[
                    TRAJECTORY_HEADER
                ]
                rated = await post(door, "/v1/feedback", {"response_id": id, "rating": 1.0})
                assert rated.json()["session"] == first.headers[TRAJECTORY_HEADER]
                got = await door.http.get(f"/v1/responses/{id}", headers={"x-api-key": "sk-a-of-a-tenant"})
                assert got.json()["id"] == id
                by_item = {"model": "far", "input": [{"type": "item_reference", "id": item}]}
                asked = len(far.bodies)
                started = (await post(door, "/v1/sessions", {})).json()["api_key"]
                for body in (more, by_item):
                    for key, named in (
                        ("sk-b-of-another", {}),
                        ("sk-b-of-another", {"x_session_id": names_of(0)}),
                        ("sk-b-of-another", {"x_session_id": names_of(1)}),
                        ("sk-a-of-a-tenant", {"x_session_id": names_of(0)}),
                        ("sk-a-of-a-tenant", {"x_session_id": names_of(1)}),
                        ("sk-a-of-a-tenant", {"x_millrace_user": "another"}),
                        (started, {}),
                    ):
                        refused = await post(door, "/v1/responses", body, key, **named)
                        assert refused.status_code in (400, 404), refused.text
                assert len(far.bodies) == asked, "an upstream would have told anybody"
        elsewhere = {"model": "far", "input": "more", "previous_response_id": "resp_of_nobody_here"}
        assert (await post(both[0], "/v1/responses", elsewhere)).json()["error"]["message"].startswith("Previous")
        assert len(far.bodies) > asked, "what nobody was told here may be known there"


ODD: list[tuple[str, str, bytes]] = [
    (method, path, body)
    for method, paths, bodies in (
        ("POST", ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions", "/v1/embeddings"), (
            b"", b"{", b"[]", b"null", b'{"model": 5}', b'{"model": "m", "messages": 5, "input": 5, "prompt": 5}',
            b'{"model": "none", "messages": [], "input": [], "prompt": ""}', b"\xff\xfe", b"[" * 5000,
            b'{"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": "hi"}]}',
            b'{"model": "m", "max_tokens": 3, "input": "hi", "prompt": "hi"}',
            b'{"model": "m", "previous_response_id": "resp_none", "input": "hi"}',
            b'{"model": "m", "input": [{"type": "item_reference", "id": "msg_none"}]}',
        )),
        ("POST", ("/v1/messages/count_tokens", "/v1/sessions", "/v1/feedback", "/v1/none", "/v1/sessions/none/end"), (
            b"", b"{", b"[]", b'{"attempt": 5}', b'{"parent": "none"}', b'{"session": "none", "rating": 1}',
            b'{"response_id": "none", "rating": 1}', b'{"parent": "x", "attempt": "y"}',
        )),
        ("GET", ("/v1/models", "/v1/models/policy", "/v1/models/none", "/health", "/v1/responses/none", "/v1/sessions",
                 "/v1/sessions?name=", "/v1/sessions?name=%ff", "/", "//v1/models", "/session//v1/models",
                 "/session/a%2Fb/v1/models", "/v1/chat/completions", "/v1/responses/none/input_items"), (b"",)),
        ("DELETE", ("/v1/responses/none", "/v1/models"), (b"",)),
        ("PUT", ("/v1/chat/completions",), (b"{}",)),
    )
    for path in paths
    for body in bodies
]  # fmt: skip


@pytest.mark.parametrize("held", [None, 0, 1])
async def test_odd_requests_are_answered_alike_through_any_door(both: list[World], held: int | None) -> None:
    async with aiohttp.ClientSession() as http:
        for method, path, body in ODD:
            answers = []
            for door in both:
                named = {} if held is None else {"x-session-id": names_of(held)}
                named |= {"x-request-id": "mine"}
                headers = {"authorization": "Bearer sk-a-of-a-tenant", "content-type": "application/json", **named}
                url = URL(f"{door.url}{path}", encoded=True)
                async with http.request(method, url, data=body, headers=headers) as answer:
                    said = await answer.read()
                    kept = {name.lower(): value for name, value in answer.headers.items()}
                kept = {
                    name: value
                    for name, value in kept.items()
                    if name not in ("date", TRAJECTORY_HEADER, "content-length")
                }
                error = json.loads(said).get("error") if answer.status >= 400 and said else None
                answers.append((answer.status, answer.reason, kept, error))
            assert answers[0] == answers[1], (method, path, body[:80])
            assert answers[0][0] != 500, (method, path, body[:80])
