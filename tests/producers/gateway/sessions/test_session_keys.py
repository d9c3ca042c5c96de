"""What a session's own key is, and what neither it nor a client may do: start sessions, take tickets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millrace.dialects.rendering.template import TemplateRenderer
from millrace.producers.gateway.sessions.ownership import Hints
from millrace.producers.gateway.sessions.sessions import Sessions
from millrace.schemas.ids import new_id
from tests.support.gateway_world import POLICY, ScriptedEngine, World, world

USER = {"role": "user", "content": "What is 3 + 4?"}
KEYS = {"sk-bot": "local", "sk-workers": "local"}


def make_engine(renderer: TemplateRenderer) -> ScriptedEngine:
    return ScriptedEngine(lambda *_: renderer.tokenizer.encode("The answer is 42.<|im_end|>"))


async def post(w: World, path: str, body: Any, key: str, **headers: str) -> tuple[int, dict[str, Any]]:
    answer = await w.http.post(path, json=body, headers={"authorization": f"Bearer {key}", **headers})
    return answer.status_code, answer.json()


@pytest.mark.parametrize("keys", [{}, KEYS])
async def test_a_session_key_that_does_not_verify_is_refused(
    tmp_path: Path, renderer: TemplateRenderer, keys: dict[str, str]
):
    other = Sessions(_folder(tmp_path / "other"), POLICY)
    foreign = other.key_of(other.make_session("local", Hints(None, ""), (), 0))
    async with world(tmp_path, renderer, make_engine(renderer), keys=keys) as w:
        for key in (foreign, "mr-", "mr-x.y", foreign[:-1]):
            assert (await w.chat([USER], key)).status_code == 401
        assert not w.events()


def test_gateways_with_one_secret_know_each_others_keys(tmp_path: Path):
    one, two = (Sessions(_folder(tmp_path / name), POLICY, "0123456789abcdef" * 2) for name in "ab")
    session = one.make_session("local", Hints(None, ""), (), 0)
    assert two.id_of(one.key_of(session)) == session.id
    assert Sessions(tmp_path / "a", POLICY, "f" * 32).id_of(one.key_of(session)) is None


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


@pytest.mark.parametrize("keys", [{}, KEYS])
@pytest.mark.parametrize("body", [{}, {"ticket": 2}, {"group": "x"}, "child"])
async def test_a_session_key_starts_no_sessions(
    tmp_path: Path, renderer: TemplateRenderer, keys: dict[str, str], body: Any
):
    async with world(tmp_path, renderer, make_engine(renderer), keys=keys, rollout_key="sk-workers") as w:
        _, session = await post(w, "/v1/sessions", {"ticket": 1}, "sk-workers")
        wanted = {"parent": session["session"]} if body == "child" else body
        status, said = await post(w, "/v1/sessions", wanted, session["api_key"])
        assert (status, said["error"]["code"]) == (403, "not_granted")
        assert len(w.events()) == 1


@pytest.mark.parametrize("group", ["7", "0", "007"])
async def test_no_client_takes_the_group_of_a_ticket(tmp_path: Path, renderer: TemplateRenderer, group: str):
    async with world(tmp_path, renderer, make_engine(renderer), keys=KEYS, rollout_key="sk-workers") as w:
        for key in KEYS:
            status, said = await post(w, "/v1/sessions", {"group": group}, key)
            assert (status, said["error"]["param"]) == (400, "group")
        status, said = await post(w, "/v1/sessions", {"ticket": 7, "group": "8"}, "sk-workers")
        assert (status, said["error"]["param"]) == (400, "group")
        assert (await post(w, "/v1/sessions", {"group": f"case-{group}"}, "sk-bot"))[0] == 200
        assert (await post(w, "/v1/sessions", {"ticket": 7, "group": "7"}, "sk-workers"))[0] == 200


EITHER = pytest.mark.parametrize("keys", [{}, KEYS])
"""without keys whoever is not the workers is as any other key of the tenant"""


@EITHER
async def test_another_key_of_the_tenant_cannot_speak_in_a_granted_episode(
    tmp_path: Path, renderer: TemplateRenderer, keys: dict[str, str]
):
    async with world(tmp_path, renderer, make_engine(renderer), keys=keys, rollout_key="sk-workers") as w:
        w.acknowledge(0)
        _, session = await post(w, "/v1/sessions", {"ticket": 1}, "sk-workers")
        body = {"model": "m", "messages": [USER]}
        named = {"x-millrace-session": session["session"]}
        status, said = await post(w, "/v1/chat/completions", body, "sk-bot", **named)
        assert (status, said["error"]["code"]) == (403, "not_granted")
        status, said = await post(w, "/v1/sessions", {"parent": session["session"]}, "sk-bot")
        assert (status, said["error"]["code"]) == (403, "not_granted")
        assert (await post(w, "/v1/chat/completions", body, "sk-workers", **named))[0] == 200
        assert (await post(w, "/v1/sessions", {"parent": session["session"]}, "sk-workers"))[0] == 200


@EITHER
async def test_a_granted_episode_is_told_of_and_ended_by_its_own_key_and_the_workers_alone(
    tmp_path: Path, renderer: TemplateRenderer, keys: dict[str, str]
):
    async with world(tmp_path, renderer, make_engine(renderer), keys=keys, rollout_key="sk-workers") as w:
        _, root = await post(w, "/v1/sessions", {"ticket": 1}, "sk-workers")
        _, child = await post(w, "/v1/sessions", {"parent": root["session"]}, "sk-workers")
        events = {"events": [{"kind": "observation", "content": "x"}]}
        for session in (child, root):
            url, before = f"/v1/sessions/{session['session']}", len(w.events())
            for path, body in (("events", events), ("end", {})):
                status, said = await post(w, f"{url}/{path}", body, "sk-bot")
                assert (status, said["error"]["code"]) == (403, "not_granted")
            assert len(w.events()) == before
            for key in (session["api_key"], "sk-workers"):
                assert (await post(w, f"{url}/events", events, key))[0] == 200
        assert (await post(w, f"/v1/sessions/{child['session']}/end", {}, child["api_key"]))[0] == 200
        assert (await post(w, f"/v1/sessions/{root['session']}/end", {}, "sk-workers"))[0] == 200
        assert not w.gateway.sessions.live


@EITHER
async def test_nobody_else_is_given_the_key_of_a_granted_episode(
    tmp_path: Path, renderer: TemplateRenderer, keys: dict[str, str]
):
    async with world(tmp_path, renderer, make_engine(renderer), keys=keys, rollout_key="sk-workers") as w:
        again = {"ticket": 1, "attempt": "a"}
        _, session = await post(w, "/v1/sessions", again, "sk-workers")
        status, said = await post(w, "/v1/sessions", again, "sk-bot")
        assert (status, said["error"]["code"]) == (403, "not_granted")
        assert await post(w, "/v1/sessions", again, "sk-workers") == (200, session)


async def test_who_rewards_a_granted_episode_does_not_keep_it_alive(tmp_path: Path, renderer: TemplateRenderer):
    async with world(tmp_path, renderer, make_engine(renderer), keys=KEYS, rollout_key="sk-workers") as w:
        _, session = await post(w, "/v1/sessions", {"ticket": 1}, "sk-workers")
        kept = w.gateway.sessions.live[session["session"]]
        kept.touched_at = 0.0
        body = {"value": 1.0, "source": "style"}
        assert (await post(w, f"/v1/sessions/{kept.id}/reward", body, "sk-bot"))[0] == 200
        assert kept.touched_at == 0.0
        assert (await post(w, f"/v1/sessions/{kept.id}/reward", body, "sk-workers"))[0] == 200
        assert kept.touched_at > 0.0


async def test_without_keys_a_caller_starts_sessions_and_takes_no_grant(tmp_path: Path, renderer: TemplateRenderer):
    async with world(tmp_path, renderer, make_engine(renderer), keys={}, rollout_key="sk-workers") as w:
        w.acknowledge(0)
        for key in ("EMPTY", "sk-anything", "mr-"):
            status, said = await post(w, "/v1/sessions", {"ticket": 1}, key)
            assert (status, said["error"]["code"]) in ((403, "not_granted"), (401, "invalid_api_key"))
        status, session = await post(w, "/v1/sessions", {"group": "case-1"}, "sk-anything")
        assert status == 200
        body = {"model": "m", "messages": [USER]}
        for key in ("sk-anything", session["api_key"]):
            assert (await post(w, "/v1/chat/completions", body, key))[0] == 200
        assert (await post(w, f"/v1/sessions/{session['session']}/end", {}, "sk-anything"))[0] == 200


@pytest.mark.parametrize("there", [False, True])
async def test_nobody_is_told_whether_another_tenant_has_a_session(
    tmp_path: Path, renderer: TemplateRenderer, there: bool
):
    keys = {"sk-one": "one", "sk-two": "two"}
    async with world(tmp_path, renderer, make_engine(renderer), keys=keys, rollout_key="sk-one") as w:
        w.acknowledge(0)
        _, session = await post(w, "/v1/sessions", {"ticket": 1}, "sk-one")
        id = session["session"] if there else new_id()
        chat = {"model": "m", "messages": [USER]}
        for _ in range(2):
            assert (await post(w, "/v1/chat/completions", chat, "sk-two", **{"x-millrace-session": id}))[0] == 200
        for path, body in (("", {"parent": id}), (f"/{id}/events", {"events": []})):
            status, said = await post(w, f"/v1/sessions{path}", body, "sk-two")
            assert (status, said["error"]["code"]) == (404, "session_not_found")
        assert [event["kind"] for event in w.events(session["session"])] == ["episode_started"]
        assert (await post(w, f"/v1/sessions/{id}/reward", {"value": 1.0}, "sk-two"))[0] == 200
        mine = [event for event in w.events() if event["tenant"] == "two"]
        assert [event["kind"] for event in mine] == ["episode_started", "model_call", "model_call", "reward"]
        (found,) = {event["trajectory"] for event in mine}
        assert found != id, "it is a name like any other"


@pytest.mark.parametrize("public", ["", "https://agents.example.org"])
async def test_a_session_is_sent_where_the_operator_says(tmp_path: Path, renderer: TemplateRenderer, public: str):
    keys = {"sk-bot": "local"}  # without keys a foreign host is refused before anything else
    async with world(tmp_path, renderer, make_engine(renderer), keys=keys, public_url=public) as w:
        odd = {"host": "evil.example.org", "x-forwarded-proto": "https", "x-forwarded-host": "evil.example.org"}
        _, session = await post(w, "/v1/sessions", {}, "sk-bot", **odd)
        assert session["base_url"] == f"{public or w.url}/v1"
