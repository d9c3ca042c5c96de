"""Evaluation through a whole gateway before a scripted engine: what it says, and what is kept of it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from millrace.apps.cli import evaluation
from millrace.apps.cli.evaluation import EvaluationOptions, evaluate, questions
from millrace.apps.demo import sort_digits
from millrace.consumers.evaluation import EvaluationSubject
from millrace.dialects.rendering.template import TemplateRenderer
from millrace.dialects.rendering.tokenizer import ChatTokenizer
from millrace.infra.config import Settings, load
from millrace.infra.errors import ConfigError, GatewayError
from millrace.infra.process.net import free_ports
from tests.support import chat_tokenizer, lessons
from tests.support.gateway_world import ScriptedEngine, World, world

pytestmark = pytest.mark.slow

AGENT = """
from openai import OpenAI


def run(task, base_url, api_key):
    assert "answer" not in task
    client = OpenAI(base_url=base_url, api_key=api_key)
    asked = [{"role": "user", "content": task["digits"]}]
    reply = client.chat.completions.create(model="policy", messages=asked)
    if reply.choices[0].message.content == "no":
        raise ValueError("gave up")
    return "right"
"""
"""asks in its own words, and fails where the model gives up"""

OPTIONS = EvaluationOptions("sort-digits", samples=2, k=(1, 2), count=12, max_tokens=16, gateway=True)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> TemplateRenderer:
    return TemplateRenderer(ChatTokenizer(chat_tokenizer.write(tmp_path_factory.mktemp("chat"))))


def answers(renderer: TemplateRenderer) -> ScriptedEngine:
    """Sorts what begins with an even digit, and gives up on the rest."""

    def script(prompt: list[int], *_: Any) -> list[int]:
        found = re.search(r"\d{6}", renderer.tokenizer.decode(prompt))
        assert found
        right = int(found[0][0]) % 2 == 0
        return renderer.tokenizer.encode(f"{sort_digits.answer(found[0]) if right else 'no'}<|im_end|>")

    return ScriptedEngine(script)


@pytest.fixture
async def served(tmp_path: Path, renderer: TemplateRenderer) -> AsyncIterator[World]:
    async with world(tmp_path, renderer, answers(renderer), patience_s=5.0) as made:
        made.acknowledge(0)
        yield made


def settings_for(served: World, home: Path) -> Settings:
    return load(flags={"gateway.port": served.url.rpartition(":")[2], "home": str(home)})


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    def version_to_evaluate(settings: Settings, version: int | None, *, files: bool) -> EvaluationSubject:
        assert (version, files) == (0, False)
        return EvaluationSubject("policy", 0, Path("v0-x"), "d" * 64, "e" * 64)

    monkeypatch.setattr(evaluation, "version_to_evaluate", version_to_evaluate)


async def test_answers_are_judged_and_kept_as_evaluation(served: World, tmp_path: Path, ledger: None) -> None:
    found = await asyncio.to_thread(evaluate, settings_for(served, tmp_path), OPTIONS)
    digits = [task["messages"][0]["content"] for task in questions(OPTIONS)]
    right = sum(int(one[0]) % 2 == 0 for one in digits)
    assert 0 < right < 12
    assert found.estimates["pass@1"].value == found.estimates["pass@2"].value == pytest.approx(right / 12)
    assert (found.policy, found.version, found.digest, found.ledger_hash) == ("policy", 0, "d" * 64, "e" * 64)
    assert (found.unfinished, found.unjudged) == (0, 0)
    events = served.events()
    started = [event for event in events if event["kind"] == "episode_started"]
    assert len(started) == 24
    assert {event["split"] for event in started} == {"evaluation"}
    assert len({event["group"] for event in started}) == 12
    rewards = [event["data"] for event in events if event["kind"] == "reward"]
    assert sorted(reward["value"] for reward in rewards) == [0.0] * (24 - 2 * right) + [1.0] * (2 * right)
    assert sum(event["kind"] == "episode_ended" for event in events) == 24
    seeds = [asked.sampling.seed for asked in served.engine.asked]
    assert len(set(seeds)) == 24


async def test_an_answer_that_no_verifier_could_judge_counts_nowhere(
    served: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ledger: None
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "failing_check.py").write_text("def check(task, output, episode):\n    raise ValueError\n")
    sort_digits.write_tasks(tmp_path / "tasks.jsonl", 2, seed=0)
    options = EvaluationOptions("tasks.jsonl", count=2, max_tokens=16, verifier="failing_check:check", gateway=True)
    found = await asyncio.to_thread(evaluate, settings_for(served, tmp_path), options)
    assert found.unjudged == 2
    assert found.estimates["mean"].questions == 0
    assert found.as_values()["estimates"]["mean"]["value"] is None
    rewards = [event["data"] for event in served.events() if event["kind"] == "reward"]
    assert [(reward["value"], reward["label"]) for reward in rewards] == [(None, "unjudged")] * 2


async def test_the_configured_agent_is_what_is_scored(
    served: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ledger: None
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "scored_agent.py").write_text(AGENT)
    rows = [{"id": str(n), "digits": digits, "answer": "right"} for n, digits in enumerate(("246802", "135791"))]
    path = lessons.write(tmp_path / "own.jsonl", rows)
    flags = {"gateway.port": served.url.rpartition(":")[2], "home": str(tmp_path), "rollout.agent": "scored_agent:run"}
    found = await asyncio.to_thread(evaluate, load(flags=flags), EvaluationOptions(str(path), count=2, gateway=True))
    assert found.agent == "scored_agent:run"
    assert (found.estimates["mean"].value, found.unfinished) == (0.5, 1)
    ended = [event["data"]["output"] for event in served.events() if event["kind"] == "episode_ended"]
    assert sorted(ended) == ["", "right"]


async def test_versions_that_change_meanwhile_are_all_named(
    served: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = iter([{3}, {4}])
    monkeypatch.setattr(evaluation, "versions", lambda url, key="": next(told))
    found = await asyncio.to_thread(evaluate, settings_for(served, tmp_path), OPTIONS)
    assert (found.version, found.digest, list(found.versions)) == (None, None, [3, 4])


def test_without_a_gateway_it_says_so(tmp_path: Path) -> None:
    settings = load(flags={"gateway.port": str(free_ports(1)[0]), "home": str(tmp_path)})
    with pytest.raises(GatewayError, match="is it up"):
        evaluate(settings, OPTIONS)
    path = lessons.write(tmp_path / "texts.jsonl", [{"prompt": "1", "answer": "1"}])
    with pytest.raises(ConfigError, match="asked by messages"):
        evaluate(settings, EvaluationOptions(str(path), gateway=True))
