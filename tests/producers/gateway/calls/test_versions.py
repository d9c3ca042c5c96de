"""A model with a version behind its policy's name: that version answers, or nobody does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.dialects.errors import ApiError
from millrace.dialects.rendering.template import TemplateRenderer
from millrace.producers.gateway.calls.models import WantedModel, parse_model
from millrace.schemas.arrays import unpack
from millrace.schemas.ids import now_micros
from millrace.schemas.labels import make_label
from tests.support.gateway_world import ScriptedEngine, World, status, world
from tests.support.speakers import SPEAKERS, Speaker

USER = {"role": "user", "content": "hi"}
OLD, NEW = "http://old.test", "http://new.test"
each = pytest.mark.parametrize("kind", SPEAKERS, ids=lambda kind: kind.name)


def make_engine(renderer: TemplateRenderer, version: int) -> ScriptedEngine:
    said = renderer.tokenizer.encode(f"I am {version}.<|im_end|>")
    return ScriptedEngine(lambda *_: said, make_label("policy", version))


@asynccontextmanager
async def two(folder: Path, renderer: TemplateRenderer, **options: Any) -> AsyncIterator[World]:
    """A gateway before engines at the versions 17 and 18."""
    engines = {OLD: make_engine(renderer, 17), NEW: make_engine(renderer, 18)}
    async with world(folder, renderer, engines, **{"patience_s": 0.2, **options}) as w:
        w.acknowledge(17, url=OLD)
        w.acknowledge(18, url=NEW)
        yield w


async def ask(w: World, model: str, key: str = "x", **fields: Any) -> Any:
    return await w.chat([USER], key, **{"model": model, **fields})


def refused(answer: Any) -> str:
    """The message of a 404 as OpenAI's clients know it."""
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    return str(error["message"])


async def test_the_engine_at_exactly_that_version_answers(tmp_path: Path, renderer: TemplateRenderer) -> None:
    async with two(tmp_path, renderer) as w:
        for version in (18, 17, 18, 17):
            answer = await ask(w, f"policy@{version}", (await w.start())["api_key"])
            assert answer.json()["choices"][0]["message"]["content"] == f"I am {version}."
            call = w.calls()[-1]
            assert set(unpack(call["output_versions"])) == {version}
            assert (call["trainable"], call["engine_version"]) == (True, OLD if version == 17 else NEW)
        assert "policy@16' now; served are policy@17, policy@18" in refused(await ask(w, "policy@16"))
        assert [model["id"] for model in (await w.http.get("/v1/models")).json()["data"]] == [
            "policy",
            "policy@17",
            "policy@18",
        ]


async def test_a_session_keeps_its_engine_but_where_a_call_names_another_version(
    tmp_path: Path, renderer: TemplateRenderer
) -> None:
    async with two(tmp_path, renderer) as w:
        session = await w.start()
        for model, said in (("policy@18", 18), ("policy", 18), ("policy@17", 17), ("any", 17)):
            answer = await ask(w, model, session["api_key"])
            assert answer.json()["choices"][0]["message"]["content"] == f"I am {said}."


async def test_a_grant_is_not_answered_by_a_version_that_is_too_old_for_it(
    tmp_path: Path, renderer: TemplateRenderer
) -> None:
    async with two(tmp_path, renderer) as w:
        session = await w.start(ticket=1, min_version=18)
        refused(await ask(w, "policy@17", session["api_key"]))
        assert (await ask(w, "policy@18", session["api_key"])).status_code == 200


@each
@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("version", ["16", "next", "017", ""])
async def test_nobody_else_answers_in_any_api(
    tmp_path: Path, renderer: TemplateRenderer, kind: type[Speaker], streamed: bool, version: str
) -> None:
    async with two(tmp_path, renderer) as w:
        body = {**kind(w).body("hi"), "model": f"policy@{version}", "stream": streamed}
        answer = await w.http.post(kind.path, json=body)
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert error["type" if kind.name == "messages" else "code"] in ("not_found_error", "model_not_found")
        assert (w.events(), w.gateway.sessions.live) == ([], {})
        for engine in w.engine.values():
            assert engine.asked == []


@each
@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("known", [False, True], ids=["unannounced", "announced"])
async def test_a_swap_in_mid_reply_ends_it(
    tmp_path: Path, renderer: TemplateRenderer, kind: type[Speaker], streamed: bool, known: bool
) -> None:
    async with two(tmp_path, renderer) as w:
        engine = w.engine[OLD]
        engine.gate = asyncio.Semaphore(3)
        body = {**kind(w).body("hi"), "model": "policy@17", "stream": streamed}
        calling = asyncio.create_task(w.http.post(kind.path, json=body))
        while not engine.gate.locked():
            await asyncio.sleep(0.01)
        engine.label = "policy@18"
        if known:
            w.acknowledge(18, url=OLD)
        for _ in range(50):
            engine.gate.release()
        answer = await calling
        assert "not policy@17's" in answer.text
        if streamed:
            last = answer.text.strip().split("\n\n")[-1].partition("data: ")[2]
            assert "not policy@17's" in json.dumps(json.loads(last).get("error", json.loads(last)))
            for end in ('"stop"', "[DONE]", "message_stop", "response.completed", "end_turn"):
                assert end not in answer.text
        else:
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        (call,) = w.calls()
        assert (call["trainable"], call["untrainable_reason"]) == (False, "other_version")
        assert call["finish_reason"] == "abort"
        versions = unpack(call["output_versions"]).tolist()
        assert versions[:3] == [17, 17, 17]
        assert versions[3:] == [18] * (len(versions) - 3)
        # The next try is told where it stands; no engine passes for one at 17.
        again = await w.http.post(kind.path, json={**body, "stream": False})
        assert again.status_code == 404
        assert (w.gateway.engines.of("policy").fleet.targets[OLD].version == 18) is known


async def test_an_engine_that_says_nothing_of_its_version_passes_for_none(
    tmp_path: Path, renderer: TemplateRenderer
) -> None:
    """As just after a start of the gateway, before the engines were heard of."""
    engines = {OLD: make_engine(renderer, 17)}
    async with world(tmp_path, renderer, engines, patience_s=0.2) as w:
        answer = await ask(w, "policy@17")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_engine")
        assert (await ask(w, "policy")).status_code == 200
    async with world(tmp_path, renderer, engines, patience_s=30) as w:
        calling = asyncio.create_task(ask(w, "policy@17"))
        await asyncio.sleep(0.05)
        w.acknowledge(17, url=OLD)
        assert (await calling).status_code == 200
        lapsed = w.gateway.engines.of("policy").fleet.targets[OLD]
        lapsed.expires_at = now_micros() - 1
        assert w.gateway.engines.of("policy").fleet.versions == set()


async def test_an_adapter_answers_for_its_version(tmp_path: Path, renderer: TemplateRenderer) -> None:
    async with two(tmp_path, renderer) as w:
        said = {**_status(w, OLD), "adapter": "policy@17"}
        w.gateway.engines.of("policy").fleet.observe(said)
        assert (await ask(w, "policy@17")).status_code == 200
        assert w.engine[OLD].adapter == "policy@17"
        w.engine[OLD].label = "mixed"  # its base changed under it
        assert (await ask(w, "policy@17")).status_code == 503


def _status(w: World, url: str) -> dict[str, Any]:
    return status(w.gateway.engines.of("policy").fleet.targets[url].version, url=url)


@given(st.text(max_size=20) | st.text("0123456789@", max_size=5), st.integers(0, 2**70))
def test_a_name_means_its_version_or_nothing(text: str, version: int) -> None:
    assert parse_model(("policy",), make_label("policy", version)) == WantedModel("policy", version)
    assert parse_model(("policy",), f"x{text}").version is None
    if text.isascii() and text.isdecimal() and str(int(text)) == text:
        assert parse_model(("policy",), f"policy@{text}") == WantedModel("policy", int(text))
    else:
        with pytest.raises(ApiError, match="names no version"):
            parse_model(("policy",), f"policy@{text}")
