"""Several policies behind one gateway: the model chooses, each call is in its own policy's lineage, and no policy
learns from another's tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from millrace.consumers.tell.command import explain_in
from millrace.consumers.tell.topics import PolicyTopics
from millrace.dialects.rendering.template import TemplateRenderer
from millrace.dialects.rendering.tokenizer import ChatTokenizer
from millrace.infra.config import load
from millrace.infra.errors import ConfigError
from millrace.producers.gateway.calls.fleet import Fleet
from millrace.producers.gateway.calls.served_policy import AwaitedPolicy, ServedPolicy
from millrace.producers.gateway.options import RewardTerms
from millrace.producers.gateway.prices import Prices
from millrace.schemas.arrays import unpack
from millrace.streams.seal.assemble import assemble
from millrace.streams.seal.attempts import call_of
from tests.support import chat_tokenizer
from tests.support.gateway_world import ENGINE, ScriptedEngine, World, world
from tests.support.speakers import SPEAKERS, Speaker

USER = {"role": "user", "content": "hi"}
SMALL = "http://small.test"
PLACE: Any = {"topic": "t", "partition": 0, "offset": 0}


def saying(renderer: TemplateRenderer, text: str, label: str) -> ScriptedEngine:
    said = renderer.tokenizer.encode(f"{text}<|im_end|>")
    return ScriptedEngine(lambda *_: said, label)


@asynccontextmanager
async def both(folder: Path, renderer: TemplateRenderer, **options: Any) -> AsyncIterator[tuple[World, ScriptedEngine]]:
    """A gateway of the policies `policy` (at version 3) and `small` (at version 5), whose contexts differ."""
    small = saying(renderer, "Small.", "small@5")
    second = TemplateRenderer(ChatTokenizer(chat_tokenizer.write(folder / "small")))
    other = ServedPolicy("small", second, Fleet("small", lambda url: small, (SMALL,)), 512, Prices(1e6, 1e6, 1e6))
    own = saying(renderer, "Large.", "policy@3")
    async with world(folder, renderer, own, others=[other], **{"patience_s": 0.2, **options}) as w:
        w.acknowledge(3, url=ENGINE)
        w.acknowledge(5, url=SMALL, policy="small")
        yield w, small


async def say(w: World, talk: list[Any], model: str, key: str) -> dict[str, Any]:
    got = await w.chat(talk, key, model=model)
    assert got.status_code == 200, got.text
    return dict(got.json()["choices"][0]["message"])


def versions(call: Any) -> set[int]:
    return set(unpack(call["output_versions"]))


@pytest.mark.parametrize("kind", SPEAKERS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "stream"])
async def test_the_model_chooses_in_every_api(
    tmp_path: Path, renderer: TemplateRenderer, kind: type[Speaker], streamed: bool
) -> None:
    async with both(tmp_path, renderer) as (w, small):
        for model, said in (("small", "Small."), ("policy", "Large."), ("any", "Large."), ("small@5", "Small.")):
            got = await w.http.post(kind.path, json={**kind(w).body(f"hi {model}"), "model": model, "stream": streamed})
            assert got.status_code == 200
            assert streamed or said in got.text
            event = w.events()[-1]
            assert said in event["data"]["response"].decode()
            assert event["policy"] == ("small" if said == "Small." else "policy")
            assert versions(event["data"]) == {5 if said == "Small." else 3}
            assert event["data"]["trainable"] is True
        assert (await w.http.post(kind.path, json={**kind(w).body("hi"), "model": "small@3"})).status_code == 404
        listed = [model["id"] for model in (await w.http.get("/v1/models")).json()["data"]]
        assert listed == ["policy", "policy@3", "small", "small@5"]
        assert set((await w.http.get("/health")).json()["engines"]) == {ENGINE, SMALL}
        assert len(small.asked) == 2


async def test_one_session_calls_both_each_in_its_own_lineage(tmp_path: Path, renderer: TemplateRenderer) -> None:
    async with both(tmp_path, renderer) as (w, small):
        session = await w.start()
        id, key = session["session"], session["api_key"]
        talk: list[Any] = [USER]
        for model in ("policy", "small", "policy", "small"):
            talk += [await say(w, talk, model, key), USER]
        # The weights of one are swapped: the other goes on as ever.
        small.label = "small@6"
        w.acknowledge(6, url=SMALL, policy="small")
        talk += [await say(w, talk, "small@6", key), USER]
        talk += [await say(w, talk, "policy@3", key), USER]
        first = w.calls(id)
        assert [versions(call) for call in first] == [{3}, {5}, {3}, {5}, {6}, {3}]
    async with both(tmp_path, renderer) as (w, small):
        talk += [await say(w, talk, "policy", key), USER]
        talk += [await say(w, talk, "small", key), USER]
        events = [event for event in w.events(id) if event["kind"] == "model_call"]
        order = ["policy", "small", "policy", "small", "small", "policy", "policy", "small"]
        assert [event["policy"] for event in events] == order
        assert [event["data"]["turn"] for event in events] == list(range(8))
        lineages: dict[str, set[str]] = {}
        for event in events:
            lineages.setdefault(event["data"]["lineage"], set()).add(event["policy"])
        assert all(len(policies) == 1 for policies in lineages.values())
        for event in w.events(id):
            assert event["policy"] == "policy" or event["kind"] == "model_call"
        # What the episode's own policy learns has no token of the other's, and says why.
        traced = [call_of(governed(event), event["data"], "policy", PLACE) for event in events]
        sealed = assemble(traced)
        own = {event["data"]["response_id"] for event in events if event["policy"] == "policy"}
        assert {call for lineage in sealed.lineages for call in lineage["calls"]} <= own
        assert {version for lineage in sealed.lineages for version in unpack(lineage["versions"])} == {-1, 3}
        others = [event["data"]["response_id"] for event in events if event["policy"] == "small"]
        assert [found for found in sealed.exclusions if found.endswith(":other_policy")] == [
            f"{response}:other_policy" for response in others
        ]


def governed(event: Any) -> Any:
    return {**event, "governance": {"eligibility": "aggregate", "reason": None}}


async def test_an_episode_belongs_to_the_policy_that_it_began_with(tmp_path: Path, renderer: TemplateRenderer) -> None:
    async with both(tmp_path, renderer) as (w, small):
        await say(w, [USER], "small", "x")
        assert {event["policy"] for event in w.events()} == {"small"}
        started = await w.start(policy="small", ticket=1, min_version=5)
        child = await w.start(parent=started["session"])
        for key in (started["api_key"], child["api_key"]):
            for model in ("small", "any"):  # a name of nobody's is the session's policy
                await say(w, [USER], model, key)
        for session in (started, child):
            assert {event["policy"] for event in w.events(session["session"])} == {"small"}
        # A grant speaks of the versions of its own policy.
        await say(w, [USER, USER], "policy", started["api_key"])
        call = w.calls(started["session"])[-1]
        assert (versions(call), call["trainable"]) == ({3}, True)
        got = await w.http.post("/v1/sessions", json={"policy": "none"})
        assert got.status_code == 404
        assert "served are policy, small" in got.text
        small.label = "small@4"
        got = await w.chat([USER, USER, USER], started["api_key"], model="small")
        assert w.calls(started["session"])[-1]["untrainable_reason"] == "old_version"


async def test_why_tells_what_every_policy_said_in_an_episode(tmp_path: Path, renderer: TemplateRenderer) -> None:
    async with both(tmp_path, renderer) as (w, _):
        session, another = await w.start(group="case"), await w.start(group="case", policy="small")
        for model in ("policy", "small"):
            await say(w, [USER], model, session["api_key"])
        await say(w, [USER], "small", another["api_key"])
        mine, theirs = (w.calls(one["session"]) for one in (session, another))
        async with asyncio.timeout(60):
            while w.log.acked < w.log.end:
                await asyncio.sleep(0.01)
        told = explain_in(PolicyTopics(w.bus, "t", "policy"), session["session"]).text
        assert [f"reply {call['response_id']}" in told for call in (*mine, *theirs)] == [True, True, False]
        assert f"model call of policy small, reply {mine[1]['response_id']}" in told


async def test_each_is_judged_by_its_own_verifiers(tmp_path: Path, renderer: TemplateRenderer) -> None:
    terms = {"small": RewardTerms(("tests",), 5_000, frozenset({"tests"}))}
    own: dict[str, Any] = {"awaits": ("verifier",), "verifiers": frozenset({"verifier"}), "other_terms": terms}
    async with both(tmp_path, renderer, **own) as (w, _):

        async def judge(id: str, source: str) -> int:
            answer = await w.http.post(f"/v1/sessions/{id}/reward", json={"value": 1.0, "source": source})
            return answer.status_code

        await say(w, [USER], "small", "x")
        await say(w, [USER], "policy", "x")
        for policy in ("small", "policy"):
            await w.start(policy=policy)
        starts = [event for event in w.events() if event["kind"] == "episode_started"]
        for event in starts:
            found = event["data"]["awaits"], event["data"]["reward_deadline_ms"]
            assert found == ((["tests"], 5_000) if event["policy"] == "small" else (["verifier"], 60_000))
            mine, others = ("tests", "verifier") if event["policy"] == "small" else ("verifier", "tests")
            assert (await judge(event["trajectory"], mine), await judge(event["trajectory"], others)) == (403, 200)
        assert [event["policy"] for event in starts] == ["small", "policy", "small", "policy"]


async def test_a_policy_that_is_not_there_yet_stops_no_other(tmp_path: Path, renderer: TemplateRenderer) -> None:
    small = saying(renderer, "Small.", "small@5")
    fleets = {name: Fleet(name, lambda url: small, (SMALL,)) for name in ("small", "late")}
    served = ServedPolicy("small", TemplateRenderer(renderer.tokenizer), fleets["small"], 512)
    awaited = [AwaitedPolicy("late", fleets["late"], "its topics were never made")]
    async with world(tmp_path, renderer, saying(renderer, "Large.", "policy@3"), others=[served], awaited=awaited) as w:
        for model in ("policy", "small"):
            await say(w, [USER], model, "x")
        late = await w.start(policy="late")
        for key, model in (("x", "late"), ("x", "late@1"), (late["api_key"], "any")):
            got = await w.chat([USER], key, model=model)
            assert (got.status_code, got.json()["error"]["code"]) == (503, "policy_awaited")
            assert "late is not served yet" in got.text
        before = len(w.events())
        health = (await w.http.get("/health")).json()
        assert health["status"] == "partial"
        assert health["policies"] == {"policy": "served", "small": "served", "late": "its topics were never made"}
        w.acknowledge(5, url=SMALL, policy="small", state="failed")
        w.acknowledge(1, url=SMALL, policy="late")
        assert (await w.http.get("/health")).json()["policies"]["small"] == "no engine"
        w.gateway.engines.join(ServedPolicy("late", TemplateRenderer(renderer.tokenizer), fleets["late"], 512))
        assert (await w.http.get("/health")).json()["policies"]["late"] == "served"
        small.label = "late@1"
        await say(w, [USER], "late@1", late["api_key"])
        assert len(w.events()) == before + 1
        assert [model["id"] for model in (await w.http.get("/v1/models")).json()["data"]] == [
            "policy", "small", "late", "late@1",
        ]  # fmt: skip


async def test_each_has_its_own_context_and_prices(tmp_path: Path, renderer: TemplateRenderer) -> None:
    async with both(tmp_path, renderer) as (w, _):
        long = [{"role": "user", "content": "word " * 150}]
        assert (await w.chat(long, model="policy")).status_code == 200
        assert (await w.chat(long, model="small")).json()["error"]["code"] == "context_length_exceeded"
        await say(w, [USER], "small", "x")
        costs = [call["cost"] for call in w.calls()]
        assert costs[0] is None
        assert costs[1] > 0


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("[gateway.policies.policy]", "is the name of"),
        ('[gateway]\nupstream_url = "http://x"\n[gateway.policies.small]', "in place of engines"),
        ("[gateway.policies.small]\nrendrer = 1", "did you mean renderer"),
    ],
)
def test_settings_that_say_two_things(tmp_path: Path, said: str, why: str) -> None:
    file = tmp_path / "millrace.toml"
    file.write_text(said)
    with pytest.raises(ConfigError, match=why):
        load(file)
