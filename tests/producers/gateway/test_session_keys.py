"""What a session's own key is, and what neither it nor a client may do: start sessions, take tickets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millrace.producers.gateway.rendering.template import TemplateRenderer
from millrace.producers.gateway.sessions import Sessions
from millrace.producers.gateway.whose import Hints
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
    foreign = other.key_of(other.unsolicited("local", Hints(None, ""), (), 0))
    async with world(tmp_path, renderer, make_engine(renderer), keys=keys) as w:
        for key in (foreign, "mr-", "mr-x.y", foreign[:-1]):
            assert (await w.chat([USER], key)).status_code == 401
        assert not w.events()


def test_gateways_with_one_secret_know_each_others_keys(tmp_path: Path):
    one, two = (Sessions(_folder(tmp_path / name), POLICY, "0123456789abcdef" * 2) for name in "ab")
    session = one.unsolicited("local", Hints(None, ""), (), 0)
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


async def test_another_key_of_the_tenant_cannot_speak_in_a_granted_episode(tmp_path: Path, renderer: TemplateRenderer):
    async with world(tmp_path, renderer, make_engine(renderer), keys=KEYS, rollout_key="sk-workers") as w:
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


@pytest.mark.parametrize("public", ["", "https://agents.example.org"])
async def test_a_session_is_sent_where_the_operator_says(tmp_path: Path, renderer: TemplateRenderer, public: str):
    keys = {"sk-bot": "local"}  # without keys a foreign host is refused before anything else
    async with world(tmp_path, renderer, make_engine(renderer), keys=keys, public_url=public) as w:
        odd = {"host": "evil.example.org", "x-forwarded-proto": "https", "x-forwarded-host": "evil.example.org"}
        _, session = await post(w, "/v1/sessions", {}, "sk-bot", **odd)
        assert session["base_url"] == f"{public or w.url}/v1"
