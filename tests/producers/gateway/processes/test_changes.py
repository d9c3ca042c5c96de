"""Processes of a gateway that come, retire and stop: no conversation is lost with them, and no budget counts twice."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from millrace.dialects.rendering.template import TemplateRenderer
from millrace.infra.gateway_processes import is_drained, mark_drain
from millrace.producers.gateway import serve as serve_module
from millrace.producers.gateway.marks import index_of
from millrace.producers.gateway.prices import Prices
from millrace.producers.gateway.processes.owner import ProcessLayout
from millrace.producers.gateway.sessions.ownership import TRAJECTORY_HEADER
from millrace.producers.gateway.spending import KeyLimits
from millrace.schemas.ids import now_micros
from tests.producers.gateway.processes.doors import (
    KEYS,
    MORE,
    USER,
    chat,
    engine_of,
    names_of,
    post,
    processes,
    sessions,
)
from tests.support.gateway_world import world


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
