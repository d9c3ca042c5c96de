"""docs/rewards.md: the judge and the unit tests that it sets up give the verdicts that it tells of."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from millrace.infra.config import Settings, load
from millrace.streams.reward import rubric
from millrace.streams.reward.choose import choose
from tests.support.documents import ROOT, Block, blocks
from tests.support.fake_http import answer, serving

PAGE = ROOT / "docs" / "rewards.md"


def shown(language: str) -> list[Block]:
    return [block for block in blocks(PAGE) if block.language == language]


def settings(folder: Path, text: str) -> Settings:
    (folder / "millrace.toml").write_text(text)
    return load(folder / "millrace.toml")


async def test_the_judge_of_the_page_judges_by_the_file_beside_its_settings(tmp_path: Path) -> None:
    rules, usage = "1 for a sorted list, else 0.", {"prompt_tokens": 1000, "completion_tokens": 100}
    (tmp_path / "rubric.md").write_text(rules)
    said = {"case": rubric.number(rules, "{}", "123"), "score": 1, "confidence": 0.75, "critique": "It is sorted."}
    reply = {"choices": [{"message": {"content": json.dumps(said)}}], "usage": usage}
    async with serving(answer(json.dumps(reply).encode())) as server:
        told = shown("toml")[0].text.replace("https://api.openai.com/v1", server.url)
        given = settings(tmp_path, told)
        found = await choose(given.reward).judge("{}", "123", {})
    assert (found.value, found.confidence, found.critique) == (1.0, 0.75, "It is sorted.")
    assert found.components["judge.cost"] == pytest.approx((1000 * 0.4 + 100 * 1.6) / 1e6)


@pytest.mark.slow
@pytest.mark.parametrize(("program", "value"), [("return 2 * n", 1.0), ("return n", 0.0)])
async def test_the_tests_of_the_page_judge_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, value: float
) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    given = settings(tmp_path, shown("toml")[1].text)
    (task,) = [block.text for block in shown("text")]
    tests = choose(given.reward, timeout_s=300)
    try:
        found = await tests.judge(task, f"```python\ndef double(n):\n    {program}\n```", {})
    finally:
        tests.close()
    assert (found.value, found.components["tests.total"]) == (value, 1.0), found.critique
