"""Who may judge: whatever is sent with a session's own key, the verifier alone makes the sealed reward."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from millrace.dialects.rendering.template import TemplateRenderer
from millrace.infra.config import Governance
from millrace.producers.client import AsyncSession
from millrace.producers.gateway.sessions.session import RewardKey
from millrace.schemas import bounds, codec
from millrace.streams.decoding import made_id
from millrace.streams.refine.stage import Refine
from millrace.streams.reward.judge import Evaluator, Judge
from millrace.streams.reward.pool import Verdict
from millrace.streams.seal.stage import Seal
from millrace.testing import world as stages
from tests.producers.gateway.sessions.test_sessions import make_engine
from tests.support.gateway_world import World, world

USER = {"role": "user", "content": "hi"}
KEYS = {"sk-app": "local", "sk-judge": "local", "sk-workers": "local"}
OPTIONS: dict[str, Any] = {
    "keys": KEYS,
    "rollout_key": "sk-workers",
    "awaits": ("verifier",),
    "verifiers": frozenset({"verifier", "style"}),
    "judges": {"sk-judge": frozenset({"style"})},
}


async def started(w: World, key: str = "sk-workers", **fields: Any) -> dict[str, str]:
    answer = await w.http.post("/v1/sessions", json=fields, headers=bearer(key))
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


async def rewarded(w: World, session: dict[str, str], key: str, **body: Any) -> Any:
    return await w.http.post(f"/v1/sessions/{session['session']}/reward", json=body, headers=bearer(key))


@pytest.mark.parametrize(
    ("key", "source", "awaits", "status"),
    [
        ("own", "agent", ["verifier"], 200),
        ("own", "verifier", ["verifier"], 403),
        ("own", "helpfulness", [], 403),
        ("own", "agent", ["agent"], 403),
        ("sk-app", "agent", ["agent"], 200),
        ("sk-app", "user", ["user"], 200),
        ("sk-app", "verifier", ["user"], 403),
        ("sk-app", "style", ["style"], 403),
        ("sk-judge", "style", ["style"], 200),
        ("sk-judge", "verifier", ["style"], 403),
        ("sk-workers", "verifier", ["verifier"], 200),
    ],
)
async def test_each_key_speaks_for_its_own_sources(
    tmp_path: Path, renderer: TemplateRenderer, key: str, source: str, awaits: list[str], status: int
) -> None:
    async with world(tmp_path, renderer, make_engine(renderer), **OPTIONS) as w:
        session = await started(w, awaits=awaits)
        used = session["api_key"] if key == "own" else key
        answer = await rewarded(w, session, used, value=1.0, source=source)
        assert answer.status_code == status, answer.text
        recorded = [event["data"]["source"] for event in w.events() if event["kind"] == "reward"]
        assert recorded == ([source] if status == 200 else [])
        if status != 200:
            assert (answer.json()["error"]["code"], answer.json()["error"]["param"]) == ("wrong_source", "source")


@pytest.mark.parametrize(
    ("key", "source", "status"),
    [
        ("", "verifier", 403),
        ("", "style", 403),
        ("anything", "verifier", 403),
        ("", "user", 200),
        ("", "agent", 200),
        ("sk-workers", "verifier", 200),
        ("own", "verifier", 403),
        ("own", "agent", 200),
    ],
)
async def test_without_keys_the_workers_key_alone_speaks_for_verifiers(
    tmp_path: Path, renderer: TemplateRenderer, key: str, source: str, status: int
) -> None:
    """The caller without a key may be the agent under training."""
    async with world(tmp_path, renderer, make_engine(renderer), **{**OPTIONS, "keys": {}}) as w:
        session = await started(w, "anything", awaits=["verifier"])
        used = session["api_key"] if key == "own" else key
        answer = await rewarded(w, session, used, value=1.0, source=source)
        assert answer.status_code == status, answer.text
        id = session["session"]
        if key != "own":
            body = {"session": id, "rating": 1.0, "source": source, "reward_id": "again"}
            assert (await w.http.post("/v1/feedback", json=body, headers=bearer(used))).status_code == status
        recorded = {event["data"]["source"] for event in w.events() if event["kind"] == "reward"}
        assert recorded == ({source} if status == 200 else set())


async def test_without_any_key_nobody_is_a_judge(tmp_path: Path, renderer: TemplateRenderer) -> None:
    """A key that was never made opens nothing, least of all to who sends none."""
    async with world(tmp_path, renderer, make_engine(renderer), **{**OPTIONS, "keys": {}, "rollout_key": ""}) as w:
        session = await started(w, "anything")
        for key in ("", "anything"):
            assert (await rewarded(w, session, key, value=1.0, source="verifier")).status_code == 403
            answer = await w.http.post("/v1/sessions", json={"ticket": 1}, headers=bearer(key))
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "not_granted")


async def test_the_key_of_a_sub_agent_speaks_for_nobody_whom_the_episode_awaits(
    tmp_path: Path, renderer: TemplateRenderer
) -> None:
    async with world(tmp_path, renderer, make_engine(renderer), **OPTIONS) as w:
        root = await started(w, awaits=["agent"])
        child = await started(w, parent=root["session"])
        assert (await rewarded(w, child, child["api_key"], value=1.0)).status_code == 403


@pytest.mark.parametrize("value", [1e30, -2e6, {"part": 1e7}])
async def test_rewards_have_bounds(tmp_path: Path, renderer: TemplateRenderer, value: Any) -> None:
    async with world(tmp_path, renderer, make_engine(renderer), **OPTIONS) as w:
        session = await started(w)
        body = {"components": value} if isinstance(value, dict) else {"value": value}
        answer = await rewarded(w, session, "sk-app", **body)
        assert answer.status_code == 400
        assert "1000000.0" in answer.text


async def test_an_episode_keeps_so_many_rewards_of_its_agent_and_still_some_of_its_judges(
    tmp_path: Path, renderer: TemplateRenderer
) -> None:
    async with world(tmp_path, renderer, make_engine(renderer), **OPTIONS) as w:
        session = await started(w)
        w.gateway.sessions.live[session["session"]].rewards |= {
            RewardKey("agent", str(n)) for n in range(bounds.REWARDS)
        }
        refused = await rewarded(w, session, session["api_key"], value=1.0)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "too_many_rewards")
        assert (await rewarded(w, session, "sk-workers", value=1.0, source="style")).status_code == 400
        assert (await rewarded(w, session, "sk-workers", value=1.0, source="verifier")).status_code == 200


CONTROLS = "\x00", "\x1f", "\n", "\x7f", "\x85"


@pytest.mark.parametrize("control", CONTROLS)
async def test_a_source_has_no_control_character_at_any_door(
    tmp_path: Path, renderer: TemplateRenderer, control: str
) -> None:
    async with world(tmp_path, renderer, make_engine(renderer), **OPTIONS) as w:
        session = await started(w)
        id, events = session["session"], [{"kind": "observation", "content": "x", "seq": 0}]
        for source in (f"verifier{control}", f"{control}verifier", f"verifier{control}x"):
            for path, body in (
                (f"sessions/{id}/reward", {"value": 1.0, "source": source}),
                ("feedback", {"session": id, "rating": 1.0, "source": source}),
                (f"sessions/{id}/events", {"events": events, "source": source}),
                ("sessions", {"awaits": ["user", source]}),
            ):
                answer = await w.http.post(f"/v1/{path}", json=body, headers=bearer("sk-workers"))
                assert (answer.status_code, "control character" in answer.text) == (400, True), (path, answer.text)
        assert [event["kind"] for event in w.events()] == ["episode_started"]


async def test_no_source_and_no_id_fill_the_room_of_a_judge(
    tmp_path: Path, renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "REWARDS", 2)
    async with world(tmp_path, renderer, make_engine(renderer), **OPTIONS) as w:
        session = await started(w)
        statuses = [
            (await rewarded(w, session, session["api_key"], value=1.0, reward_id=f"verifier\x1f{n}")).status_code
            for n in range(3)
        ]
        assert statuses == [200, 200, 400]
        # A log of an older gateway may hold such sources.
        w.gateway.sessions.live[session["session"]].rewards |= {RewardKey("verifier\x1fx", str(n)) for n in range(3)}
        for status in (200, 200, 400):
            answer = await rewarded(w, session, "sk-workers", value=1.0, source="verifier")
            assert answer.status_code == status, answer.text


async def test_ids_of_an_agent_do_not_silence_a_judge(tmp_path: Path, renderer: TemplateRenderer) -> None:
    async with world(tmp_path, renderer, make_engine(renderer), **OPTIONS) as w:
        session = await started(w)
        await rewarded(w, session, session["api_key"], value=9.0, reward_id="r")
        await rewarded(w, session, "sk-workers", value=1.0, reward_id="r", source="verifier")
        said = [event["data"]["source"] for event in w.events() if event["kind"] == "reward"]
        assert said == ["agent", "verifier"]


async def test_a_session_that_was_started_here_judges_with_the_key_that_started_it(
    tmp_path: Path, renderer: TemplateRenderer
) -> None:
    async with world(tmp_path, renderer, make_engine(renderer), **OPTIONS) as w:
        async with await AsyncSession.start(f"{w.url}/v1", "sk-app", awaits=["user"]) as session:
            await session.reward(1.0, source="user")
        assert [event["data"]["source"] for event in w.events() if event["kind"] == "reward"] == ["user"]


TOPICS = {
    "raw": 2,
    "events": 2,
    "dead-letters": 2,
    "policy.trajectories": 2,
    "policy.evaluations": 2,
    "policy.completions": 1,
    "decisions": 1,
}


class Always:
    async def judge(self, task: str, output: str, episode: dict[str, Any]) -> Any:
        return Verdict(0.25, {}, None, None, None)


@pytest.mark.parametrize("seed", range(6))
async def test_no_requests_with_a_session_key_change_the_sealed_reward(
    tmp_path: Path, renderer: TemplateRenderer, seed: int
) -> None:
    """Also with the ids that the verifier will use, which follow from the episode's id."""
    r = random.Random(seed)
    async with world(tmp_path, renderer, make_engine(renderer), **OPTIONS) as w:
        session = await started(w, group="g", task="sort", awaits=["verifier"])
        id, own = session["session"], session["api_key"]
        ids = [made_id("reward", id, "verifier", "1"), "x", "y"]
        await w.chat([USER], own)

        async def attack() -> None:
            for _ in range(r.randint(1, 6)):
                body: dict[str, Any] = {"value": r.choice([1000.0, -5.0, None, 0.0])}
                for name, values in (
                    ("source", ["agent", "verifier", "style", "user"]),
                    ("reward_id", ids),
                    ("supersedes", ids),
                    ("rubric_version", ["", "1"]),
                    ("target_kind", ["trajectory", "group", "turn"]),
                    ("target", [id, "g"]),
                    ("failure", ["timeout"]),
                ):
                    if r.random() < 0.6:
                        body[name] = r.choice(values)
                answer = await rewarded(w, session, own, **body)
                assert answer.status_code in (200, 400, 403), answer.text

        await attack()
        await w.http.post(f"/v1/sessions/{id}/end", json={}, headers=bearer(own))
        before = len(w.events())
        await attack()
        events = w.events()

    sealed = await seal(events, before, late=r.random() < 0.5)
    assert sealed["reward"] == 0.25
    assert [one["value"] for one in sealed["rewards"] if one["source"] == "verifier"] == [0.25]


async def seal(events: list[dict[str, Any]], before: int, *, late: bool) -> dict[str, Any]:
    """The trajectory that refine, a judge and seal make; the verdict comes before or after what came after the end."""
    judge = Judge(Always(), Evaluator("verifier", "v", "1"), "policy")
    made = [lambda: Refine(Governance(), [], slots=2), lambda: Seal(["policy"])]
    with stages.World(0, TOPICS, made, chances=stages.CALM) as w:
        send(w, events if late else events[:before])
        for record in w.records("events"):
            out = await judge(record)
            if out is not None:
                send(w, [codec.decode_as("Event", out.value or b"")])
        send(w, [] if late else events[before:])
        (found,) = w.decoded("policy.trajectories")
    return dict(found)


def send(w: stages.World, events: list[dict[str, Any]]) -> None:
    for event in events:
        record = {name: value for name, value in event.items() if name != "data"}
        source = {"source": "gateway"} if event["source_seq"] is not None else {}
        w.send("raw", f"{event['tenant']}/{event['group']}", "Event", record, **source)
    w.drain()
