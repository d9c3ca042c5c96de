"""docs/rewards.md: the judge and the unit tests that it sets up give the verdicts that it tells of."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from millrace.infra.config import Settings, load
from millrace.infra.engines.upstream import TextUpstream
from millrace.streams.reward import rubric
from millrace.streams.reward.choose import choose
from tests.support.documents import ROOT, Block, blocks
from tests.support.fake_http import answer, serving
from tests.support.gateway_world import world

PAGE = ROOT / "docs" / "rewards.md"


def shown(language: str) -> list[Block]:
    return [block for block in blocks(PAGE) if block.language == language]


def settings(folder: Path, text: str) -> Settings:
    (folder / "millrace.toml").write_text(text)
    return load(folder / "millrace.toml")


@pytest.mark.parametrize(
    ("number", "url", "prices"),
    [(0, "https://api.openai.com/v1", (0.4, 1.6)), (1, "https://api.anthropic.com/v1", (3, 15))],
)
async def test_the_judges_of_the_page_judge_by_the_file_beside_its_settings(
    tmp_path: Path, number: int, url: str, prices: tuple[float, float]
) -> None:
    rules = "1 for a sorted list, else 0."
    (tmp_path / "rubric.md").write_text(rules)
    said = {"case": rubric.number(rules, "{}", "123"), "score": 1, "confidence": 0.75, "critique": "It is sorted."}
    text = json.dumps(said)
    reply: dict[str, Any] = {"content": [{"type": "text", "text": text}]}
    reply["usage"] = {"input_tokens": 700, "cache_read_input_tokens": 300, "output_tokens": 100}
    if number == 0:
        reply = {"choices": [{"message": {"content": text}}]}
        reply["usage"] = {"prompt_tokens": 1000, "completion_tokens": 100}
    async with serving(answer(json.dumps(reply).encode())) as server:
        told = shown("toml")[number].text.replace(url, server.url)
        given = settings(tmp_path, told)
        found = await choose(given.reward).judge("{}", "123", {})
    assert (found.value, found.confidence, found.critique) == (1.0, 0.75, "It is sorted.")
    assert found.components["judge.cost"] == pytest.approx((1000 * prices[0] + 100 * prices[1]) / 1e6)


@pytest.mark.slow
@pytest.mark.parametrize(("program", "value"), [("return 2 * n", 1.0), ("return n", 0.0)])
async def test_the_tests_of_the_page_judge_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, value: float
) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    given = settings(tmp_path, shown("toml")[2].text)
    (task,) = [block.text for block in shown("text")]
    tests = choose(given.reward, timeout_s=300)
    try:
        found = await tests.judge(task, f"```python\ndef double(n):\n    {program}\n```", {})
    finally:
        tests.close()
    assert (found.value, found.components["tests.total"]) == (value, 1.0), found.critique


async def test_the_feedback_of_the_page_becomes_two_rewards_of_the_reply(tmp_path: Path) -> None:
    """Of a reply that an upstream gave, under the upstream's own id."""
    (program,) = [block.text for block in shown("python")]
    choice = {"index": 0, "message": {"role": "assistant", "content": "352041"}, "finish_reason": "stop"}
    said = {"id": "upstream-7", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    async with serving(answer(json.dumps(said).encode())) as server:
        upstream = TextUpstream(f"{server.url}/v1")
        async with world(tmp_path, None, None, upstream=upstream, keys={"a long random word": "local"}) as w:
            typed = program.replace("http://127.0.0.1:8900", w.url)
            ran = await asyncio.create_subprocess_exec(sys.executable, "-c", typed)
            assert await ran.wait() == 0
            found = [event["data"] for event in w.events() if event["kind"] == "reward"]
            await upstream.close()
    assert {one["target"] for one in found} == {"upstream-7"}
    assert [(one["value"], one["critique"], one["supersedes"]) for one in found] == [
        (0.0, None, None),
        (-1.0, "012345", "click-1"),
    ]
