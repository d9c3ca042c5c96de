"""Two processes of one gateway, each behind a door of its own: through either door a conversation is the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from yarl import URL

from millrace.dialects.rendering.template import TemplateRenderer
from millrace.producers.gateway.marks import index_of
from millrace.producers.gateway.processes.owner import ProcessLayout, choose_process
from millrace.producers.gateway.sessions.ownership import TRAJECTORY_HEADER
from millrace.producers.gateway.upstreams.routes import RouteRule
from millrace.producers.gateway.upstreams.upstreams import Upstream, Upstreams
from tests.producers.gateway.far_responses import FarResponses
from tests.producers.gateway.processes.doors import (
    CALL,
    KEYS,
    MORE,
    TOOLS,
    USER,
    chat,
    engine_of,
    names_of,
    post,
    processes,
    sessions,
)
from tests.support.gateway_world import World, world
from tests.support.in_process import PlayedUpstream


@pytest.fixture
async def both(tmp_path: Path, renderer: TemplateRenderer) -> AsyncIterator[list[World]]:
    async with processes(tmp_path, renderer) as both:
        yield both


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
