"""Sessions: versions that a grant demands, rewards, ends, restarts, full disks, silence, keys."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from millrace.dialects.rendering.template import TemplateRenderer
from millrace.producers.client import AsyncSession, GatewayRefused, Session
from millrace.schemas.arrays import unpack
from millrace.schemas.chain import START, event_hash
from tests.support.gateway_world import ScriptedEngine, World, world

USER = {"role": "user", "content": "What is 3 + 4?"}
MORE = {"role": "user", "content": "And then?"}


def make_engine(renderer: TemplateRenderer) -> ScriptedEngine:
    return ScriptedEngine(lambda *_: renderer.tokenizer.encode("The answer is 42.<|im_end|>"))


@pytest.fixture
async def w(tmp_path: Path, renderer: TemplateRenderer) -> AsyncIterator[World]:
    async with world(tmp_path, renderer, make_engine(renderer), patience_s=5.0) as w:
        yield w


def check_chain(w: World, trajectory: str) -> list[dict[str, Any]]:
    """Steps are dense and links unbroken; returns the events."""
    link = START
    events = w.events(trajectory)
    for step, event in enumerate(events):
        assert (event["step"], event["prev_hash"]) == (step, link)
        link = event_hash(link, event)
        assert event["hash"] == link
    return events


# ---------------------------------------------------------------------- versions


async def test_a_granted_call_waits_for_its_version(w: World):
    session = await w.start(ticket=1, min_version=2)
    w.engine.label = "policy@2"
    calling = asyncio.create_task(w.chat([USER], session["api_key"]))
    w.acknowledge(1)
    await asyncio.sleep(0.2)
    assert w.engine.asked == []
    w.acknowledge(2)
    assert (await calling).status_code == 200
    (call,) = w.calls()
    assert (call["trainable"], call["engine_incarnation"]) == (True, "one")
    assert set(unpack(call["output_versions"])) == {2}


async def test_no_version_in_time_is_an_error_to_try_again(tmp_path: Path, renderer: TemplateRenderer):
    async with world(tmp_path, renderer, make_engine(renderer), patience_s=0.2) as w:
        session = await w.start(ticket=1, min_version=3)
        w.acknowledge(2)
        answer = await w.chat([USER], session["api_key"])
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_engine")
        assert answer.headers["retry-after"] == "1"
        w.acknowledge(3)
        w.engine.label = "policy@3"
        assert (await w.chat([USER], session["api_key"])).status_code == 200
        assert w.calls()[0]["supersedes"] is None


async def test_a_new_incarnation_serves_nobody_until_it_acknowledged(tmp_path: Path, renderer: TemplateRenderer):
    async with world(tmp_path, renderer, make_engine(renderer), patience_s=0.2) as w:
        session = await w.start(ticket=1, min_version=0)
        w.acknowledge(5, incarnation="one")
        w.acknowledge(0, state="loading", incarnation="two")
        assert (await w.chat([USER], session["api_key"])).status_code == 503
        w.acknowledge(5, incarnation="two")
        assert (await w.chat([USER], session["api_key"])).status_code == 200
        assert w.calls()[0]["engine_incarnation"] == "two"


@pytest.mark.parametrize(("label", "reason"), [("policy@1", "old_version"), ("default", "unknown_version")])
async def test_tokens_of_an_old_or_unknown_version_never_train(
    tmp_path: Path, renderer: TemplateRenderer, label: str, reason: str
):
    async with world(tmp_path, renderer, make_engine(renderer), patience_s=0.2) as w:
        session = await w.start(ticket=1, min_version=2)
        w.acknowledge(2)
        w.engine.label = label
        assert (await w.chat([USER], session["api_key"])).status_code == 200
        (call,) = w.calls()
        assert (call["trainable"], call["untrainable_reason"]) == (False, reason)
        assert (await w.chat([USER, MORE], session["api_key"])).status_code == 503, "the engine is doubted now"


async def test_a_swap_in_the_middle_is_kept_token_by_token(w: World):
    session = await w.start(ticket=1)
    w.acknowledge(0)
    w.engine.gate = asyncio.Semaphore(3)
    calling = asyncio.create_task(w.chat([USER], session["api_key"]))
    while not w.engine.gate.locked():
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    w.engine.label = "policy@1"
    for _ in range(50):
        w.engine.gate.release()
    await calling
    versions = unpack(w.calls()[0]["output_versions"]).tolist()
    assert versions[:3] == [0, 0, 0]
    assert set(versions[3:]) == {1}


async def test_others_are_served_even_if_nobody_vouches_for_the_engine(w: World):
    assert (await w.chat([USER])).status_code == 200
    session = await w.start(split="evaluation")
    assert (await w.chat([USER], session["api_key"])).status_code == 200


# ---------------------------------------------------------------------- rewards, events, ends


async def test_the_client_says_everything(w: World):
    said = {"versions": {"agent": "a-1", "retrieval": "index-7"}, "replay": "approximate", "budget": {"turns": 3}}
    async with await AsyncSession.start(f"{w.url}/v1", task_id="t", **said) as session:
        answer = (await w.chat([USER], session.api_key)).json()
        await session.tool_call("c1", "add", {"a": 1})
        await session.tool_result("c1", "add", "7", latency_us=5, tool_version="2", side_effect="reversible")
        await session.observation("a page", media_type="text/html", origin="browser")
        memory = {"kind": "memory", "id": "m1", "version": "4"}
        await session.internal_state("thinking", confidence=0.5, injected=[memory])
        await session.feedback(rating=1.0, label="thumbs_up")
        await session.security("internal", ["pii"])
        await session.reward(
            1.0,
            source="tests",
            response_id=answer["id"],
            reward_id="r1",
            components={"a": 1.0},
            signal="task_outcome",
            confidence=0.9,
        )
        await session.reward(1.0, source="tests", response_id=answer["id"], reward_id="r1")
        await session.reward(0.5)
    events = check_chain(w, session.id)
    assert [e["kind"] for e in events] == [
        "episode_started", "model_call", "tool_call", "tool_result", "observation", "internal_state", "user_feedback",
        "security_label", "reward", "reward", "episode_ended",
    ]  # fmt: skip
    start, result, state = (events[n]["data"] for n in (0, 3, 5))
    assert (start["versions"]["retrieval"], start["replay"], start["budget"]) == (
        "index-7",
        "approximate",
        {"turns": 3},
    )
    assert (result["tool_version"], result["side_effect"], state["injected"]) == ("2", "reversible", [memory])
    reward = events[8]["data"]
    assert (reward["signal"], reward["confidence"]) == ("task_outcome", 0.9)
    assert (reward["target_kind"], reward["target"]) == ("turn", answer["id"])
    assert (events[9]["data"]["target_kind"], events[9]["data"]["target"]) == ("trajectory", session.id)
    end = events[-1]["data"]
    assert (end["status"], end["output"], end["whole"], end["steps"]) == ("completed", "The answer is 42.", True, 10)
    async with AsyncSession.attach(f"{w.url}/v1", session.api_key) as late:
        await late.end()
        assert len(w.events(session.id)) == 11
        await late.reward(0.0, reward_id="r2")
        assert check_chain(w, session.id)[-1]["data"]["source"] == "agent"
        with pytest.raises(GatewayRefused, match="has ended"):
            await late.observation("too late")


async def test_the_synchronous_client(w: World):
    def work() -> str:
        session = Session.start(f"{w.url}/v1")
        with suppress(ValueError), session:
            session.observation("x")
            raise ValueError("boom")
        return session.id

    id = await asyncio.to_thread(work)
    end = check_chain(w, id)[-1]["data"]
    assert (end["status"], end["reason"]) == ("failed", "ValueError: boom")


async def test_starting_an_attempt_again_gives_the_same_session(w: World):
    one = await w.start(ticket=1, attempt="a", sample=0, group_size=2)
    assert await w.start(ticket=1, attempt="a", sample=0, group_size=2) == one
    assert await w.start(ticket=1, attempt="b", sample=0, group_size=2) != one


async def test_ending_a_session_ends_its_calls_first(w: World):
    session = await w.start()
    w.engine.gate = asyncio.Semaphore(2)
    async with w.http.stream(
        "POST",
        "/v1/chat/completions",
        json={"model": "m", "messages": [USER], "stream": True},
        headers={"authorization": f"Bearer {session['api_key']}"},
    ) as answer:
        await anext(answer.aiter_lines())
        ended = await w.http.post(f"/v1/sessions/{session['session']}/end", json={"status": "aborted"})
        assert ended.status_code == 200
    kinds = [e["kind"] for e in check_chain(w, session["session"])]
    assert kinds == ["episode_started", "model_call", "episode_ended"]
    assert w.calls()[0]["finish_reason"] == "abort"
    assert (await w.chat([USER], session["api_key"])).json()["error"]["code"] == "session_ended"


async def test_silence_ends_an_episode(tmp_path: Path, renderer: TemplateRenderer):
    async with world(tmp_path, renderer, make_engine(renderer), idle_timeout_s=0.3) as w:
        await w.chat([USER])
        session = await w.start(ticket=7)
        for _ in range(3000):
            if not w.gateway.sessions.live:
                break
            await asyncio.sleep(0.02)
        ends = [e["data"] for e in w.events() if e["kind"] == "episode_ended"]
        assert [(e["status"], e["stop_condition"]) for e in ends] == [("completed", "idle"), ("abandoned", "idle")]
        reward = {"value": 1.0}
        answer = await w.http.post(f"/v1/sessions/{session['session']}/reward", json=reward)
        assert answer.status_code == 200


async def test_sub_agents_share_group_and_root(w: World):
    parent = await w.start(ticket=3)
    child = await w.start(parent=parent["session"], spawn_call="call_1")
    event = check_chain(w, child["session"])[0]
    assert (event["group"], event["root_trajectory"], event["parent_trajectory"], event["spawn_call"]) == (
        "3", parent["session"], parent["session"], "call_1",
    )  # fmt: skip
    assert event["attempt"] == parent["session"]


# ---------------------------------------------------------------------- restarts


async def test_a_restart_goes_on_where_the_log_ends(tmp_path: Path, renderer: TemplateRenderer):
    async with world(tmp_path, renderer, make_engine(renderer)) as w:
        session, ended, other = await w.start(ticket=3, min_version=0), await w.start(), await w.start()
        w.acknowledge(0)
        key = session["api_key"]
        reply = (await w.chat([USER], key)).json()["choices"][0]["message"]
        await w.http.post(f"/v1/sessions/{session['session']}/reward", json={"value": 1, "reward_id": "r"})
        await w.http.post(f"/v1/sessions/{ended['session']}/end", json={})
        stray = (await w.chat([{"role": "user", "content": "stray"}])).json()["choices"][0]["message"]
    async with world(tmp_path, renderer, make_engine(renderer)) as w:
        assert set(w.gateway.sessions.live) >= {session["session"], other["session"]}
        w.acknowledge(0)
        await w.chat([USER, reply, MORE], key)
        await w.chat([USER, reply, MORE], key)
        await w.http.post(f"/v1/sessions/{session['session']}/reward", json={"value": 1, "reward_id": "r"})
        late = await w.http.post(f"/v1/sessions/{ended['session']}/reward", json={"value": 1})
        assert late.status_code == 200
        await w.chat([{"role": "user", "content": "stray"}, stray, MORE])
        one, two, three = w.calls(session["session"])
        assert (two["opened"], two["lineage"], two["turn"]) == (None, one["lineage"], 1)
        assert two["prefix_len"] == len(unpack(one["prompt_ids"])) + len(unpack(one["output_ids"]))
        assert (three["supersedes"], three["turn"]) == (two["response_id"], 1)
        assert [e["kind"] for e in check_chain(w, session["session"])].count("reward") == 1
        check_chain(w, ended["session"])
        strays = [e for e in w.events() if e["kind"] == "model_call" and e["trajectory"] == e["group"]]
        assert len({e["trajectory"] for e in strays}) == 1
        sources = [kept.entry.headers["source-seq"] for kept in w.log.read()]
        assert sources == [str(n) for n in range(len(sources))]


# ---------------------------------------------------------------------- full disks


class Disk:
    """A disk that can be full."""

    full = False

    def write(self, descriptor: int, data: bytes) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.write(descriptor, data)


@pytest.mark.parametrize("reserve", [True, False])
async def test_a_full_disk_marks_trajectories_and_serving_goes_on(
    tmp_path: Path, renderer: TemplateRenderer, reserve: bool
):
    disk = Disk()
    async with world(tmp_path, renderer, make_engine(renderer), log_options={"write": disk.write}) as w:
        session = await w.start()
        shrink = w.log._shrink_reserve

        def freeing(size: int) -> None:
            shrink(size)
            disk.full = False

        disk.full = True
        if reserve:
            w.log._shrink_reserve = freeing
        assert (await w.chat([USER], session["api_key"])).status_code == 200
        disk.full = True
        refused = await w.http.post("/v1/sessions", json={})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "log_full")
        disk.full = False
        await w.http.post(f"/v1/sessions/{session['session']}/end", json={})
        events = check_chain(w, session["session"])
        assert [e["kind"] for e in events] == ["episode_started", "gap", "episode_ended"]
        assert events[-1]["data"]["whole"] is False
        assert not w.gateway.sessions.live


async def test_an_end_that_not_even_the_reserve_takes_is_refused_until_there_is_room(
    tmp_path: Path, renderer: TemplateRenderer
):
    disk = Disk()
    async with world(tmp_path, renderer, make_engine(renderer), log_options={"write": disk.write}) as w:
        session = await w.start()
        path = f"/v1/sessions/{session['session']}/end"
        for disk.full, status in ((True, 503), (False, 200), (True, 200)):
            assert (await w.http.post(path, json={"output": "7"})).status_code == status
        assert not w.gateway.sessions.live
    async with world(tmp_path, renderer, make_engine(renderer)) as w:
        events = check_chain(w, session["session"])
        assert [event["kind"] for event in events] == ["episode_started", "episode_ended"]
        assert (events[-1]["data"]["output"], events[-1]["data"]["whole"]) == ("7", True)
        assert not w.gateway.sessions.live


# ---------------------------------------------------------------------- keys


async def test_only_the_key_of_rollouts_takes_grants(tmp_path: Path, renderer: TemplateRenderer):
    keys = {"sk-one": "one", "sk-two": "one"}
    async with world(tmp_path, renderer, make_engine(renderer), keys=keys, rollout_key="sk-two") as w:
        for key, status in (("sk-one", 403), ("sk-two", 200)):
            headers = {"authorization": f"Bearer {key}"}
            answer = await w.http.post("/v1/sessions", json={"ticket": 1}, headers=headers)
            assert answer.status_code == status, answer.text
        headers = {"authorization": f"Bearer {answer.json()['api_key']}"}
        answer = await w.http.post("/v1/sessions", json={"ticket": 2}, headers=headers)
        assert answer.json()["error"]["code"] == "not_granted"


async def test_static_keys_and_session_keys(tmp_path: Path, renderer: TemplateRenderer):
    keys = {"sk-one": "one", "sk-two": "two"}
    async with world(tmp_path, renderer, make_engine(renderer), keys=keys) as w:
        assert (await w.chat([USER], "wrong")).json()["error"]["code"] == "invalid_api_key"
        headers = {"authorization": "Bearer sk-one"}
        session = (await w.http.post("/v1/sessions", json={}, headers=headers)).json()
        assert (await w.chat([USER], session["api_key"])).status_code == 200
        forged = session["api_key"][:-1] + ("0" if session["api_key"][-1] != "0" else "1")
        assert (await w.chat([USER], forged)).status_code == 401
        for odd in (f"{session['api_key'][:-1]}é", "é"):
            answer = await w.http.get("/v1/models", headers={"authorization": f"Bearer {odd}".encode("latin-1")})
            assert answer.status_code == 401
        url = f"/v1/sessions/{session['session']}/end"
        assert (await w.http.post(url, json={}, headers={"authorization": "Bearer sk-two"})).status_code == 404
        assert (await w.http.post(url, json={})).status_code == 401
        other = (await w.http.post("/v1/sessions", json={}, headers=headers)).json()
        by_other = {"authorization": f"Bearer {other['api_key']}"}
        assert (await w.http.post(url, json={}, headers=by_other)).json()["error"]["code"] == "wrong_session"
        named = {**headers, "x-millrace-session": session["session"]}
        body = {"model": "m", "messages": [USER]}
        assert (await w.http.post("/v1/chat/completions", json=body, headers=named)).status_code == 200
        assert len(w.calls(session["session"])) == 2
        assert {e["tenant"] for e in w.events()} == {"one"}
        stolen = {"authorization": "Bearer sk-two", "x-millrace-session": session["session"]}
        answer = await w.http.post("/v1/chat/completions", json=body, headers=stolen)
        assert answer.status_code == 200
        assert len(w.calls(session["session"])) == 2, "that was an episode of its own"
        assert w.events()[-1]["tenant"] == "two"
