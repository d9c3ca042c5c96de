"""A name that is in use all the time does not hold one episode open for ever; a start reads the capture log once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.dialects.rendering.template import TemplateRenderer
from millrace.producers.capture.entry import StoredEntry
from millrace.producers.capture.log import CaptureLog
from millrace.producers.gateway.sessions.ownership import Hints
from millrace.producers.gateway.sessions.session import GatewaySession
from millrace.producers.gateway.sessions.sessions import NAMED_CALLS, Sessions
from tests.support.gateway_world import POLICY, ScriptedEngine, World, world

HI = {"role": "user", "content": "Hi"}
MORE = {"role": "user", "content": "And then?"}
NAME = {"x-millrace-session": "my-bot"}


def make_engine(renderer: TemplateRenderer) -> ScriptedEngine:
    return ScriptedEngine(lambda *_: renderer.tokenizer.encode("The answer is 42.<|im_end|>"))


async def say(w: World, *messages: Any) -> Any:
    answer = await w.http.post("/v1/chat/completions", json={"model": "m", "messages": messages}, headers=NAME)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


def trajectories(w: World) -> list[str]:
    return [event["trajectory"] for event in w.events() if event["kind"] == "model_call"]


def grown_old(session: GatewaySession, sessions: Sessions) -> None:
    session.began -= int(sessions.named_s * 1e6)


def much_used(session: GatewaySession, sessions: Sessions) -> None:
    session.lineages.turns = NAMED_CALLS


@pytest.mark.parametrize("wear", [grown_old, much_used])
async def test_a_name_begins_another_episode_when_one_is_worn(tmp_path: Path, renderer: TemplateRenderer, wear: Any):
    async with world(tmp_path, renderer, make_engine(renderer)) as w:
        sessions = w.gateway.sessions
        reply = await say(w, HI)
        await say(w, HI, reply, MORE)
        (first,) = sessions.live.values()
        wear(first, sessions)
        await say(w, HI)
        await say(w, HI)
        one, same, two, still = trajectories(w)
        assert (same, still) == (one, two)
        assert two != one
        assert not first.has_ended
        await w.gateway.end(first, status="completed", stop_condition="idle")
        await say(w, MORE)
        assert trajectories(w)[-1] == two, "the end of the former episode takes no name from the next"


async def test_after_a_restart_a_name_still_leads_to_its_newest_episode(tmp_path: Path, renderer: TemplateRenderer):
    async with world(tmp_path, renderer, make_engine(renderer)) as w:
        await say(w, HI)
        (first,) = w.gateway.sessions.live.values()
        grown_old(first, w.gateway.sessions)
        await say(w, HI)
        one, two = trajectories(w)
    log = CaptureLog(tmp_path / "capture")
    sessions = Sessions(log.folder, POLICY)
    assert sessions.rebuild(log) == 2, "silence has ended neither"
    newest = sessions.find_by_name(first.tenant, Hints(NAME["x-millrace-session"], ""))
    assert newest is not None
    assert (newest.id, first.id) == (two, one)
    log.close()


async def test_a_start_reads_each_entry_once(tmp_path: Path, renderer: TemplateRenderer):
    async with world(tmp_path, renderer, make_engine(renderer)) as w:
        ended = await w.start(task_id="over")
        await w.chat([HI], ended["api_key"])
        await w.http.post(
            f"/v1/sessions/{ended['session']}/end", json={}, headers={"authorization": f"Bearer {ended['api_key']}"}
        )
        await w.http.post(
            f"/v1/sessions/{ended['session']}/reward",
            json={"value": 1.0, "reward_id": "late"},
            headers={"authorization": f"Bearer {ended['api_key']}"},
        )
        await say(w, HI)
        before = w.gateway.sessions
        steps = {
            session.id: (session.step, session.link) for session in (*before.live.values(), *before.ended.values())
        }
    log, seen = Watched(tmp_path / "capture"), list[int]()
    log.seen = seen
    sessions = Sessions(log.folder, POLICY)
    assert sessions.rebuild(log) == 1
    assert seen == list(range(log.end))
    assert list(sessions.ended) == [ended["session"]]
    over = sessions.ended[ended["session"]]
    assert over.rewards == {("agent", "late")}
    assert {one.id: (one.step, one.link) for one in (over, *sessions.live.values())} == steps
    assert not over.lineages.turns, "what only a live session needs is not kept"
    log.close()


class Watched(CaptureLog):
    """Notes the number of each entry that is read from it."""

    seen: list[int]

    def read(self, seq: int = 0) -> Iterator[StoredEntry]:
        for kept in super().read(seq):
            if hasattr(self, "seen"):
                self.seen.append(kept.seq)
            yield kept


async def test_a_name_is_asked_for_by_its_tenant_alone(tmp_path: Path, renderer: TemplateRenderer):
    keys = {"sk-one": "one", "sk-two": "two"}
    name = "team/chat 17"
    async with world(tmp_path, renderer, make_engine(renderer), keys=keys, rollout_key="sk-one") as w:

        async def asked(key: str, **query: str) -> Any:
            return await w.http.get("/v1/sessions", params=query, headers={"authorization": f"Bearer {key}"})

        for key, user in (("sk-one", "ann"), ("sk-one", "ben"), ("sk-two", "ann")):
            headers = {"authorization": f"Bearer {key}", "x-millrace-session": name, "x-millrace-user": user}
            body = {"model": "m", "messages": [HI]}
            answer = await w.http.post("/v1/chat/completions", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
        first, second, foreign = trajectories(w)
        await w.gateway.end(w.gateway.sessions.live[first], status="completed", stop_condition="idle")
        found = (await asked("sk-one", name=name)).json()["sessions"]
        assert found == [{"session": first, "live": False}, {"session": second, "live": True}]
        assert (await asked("sk-two", name=name)).json()["sessions"] == [{"session": foreign, "live": True}]
        assert (await asked("sk-one", name="nobody's")).json() == {"sessions": []}
        assert (await asked("sk-one")).status_code == 400
        own = w.gateway.sessions.key_of(w.gateway.sessions.live[second])
        assert (await asked(own, name=name)).status_code == 403
