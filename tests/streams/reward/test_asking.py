"""A judge over HTTP: whatever it does ends as a verdict or as a labelled failure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millrace.infra.config import Reward, RewardJudge
from millrace.infra.errors import RewardError
from millrace.infra.log.base import Record
from millrace.schemas import codec
from millrace.streams.reward import rubric
from millrace.streams.reward.asking import AskedJudge
from millrace.streams.reward.choose import choose, independent
from millrace.streams.reward.judge import Evaluator, Judge
from millrace.testing.events import Episode
from tests.support.fake_http import answer, serving, stream

RULES = "Full marks for a sorted list."


def judge(folder: Path, url: str, timeout_s: float = 60, **more: Any) -> AskedJudge:
    (folder / "rubric.md").write_text(f"{RULES}\n")
    options = RewardJudge(url=url, model="m", rubric=str(folder / "rubric.md"), tries=2, **more)
    return AskedJudge(options, timeout_s)


def good(task: str = "{}", output: str = "said") -> bytes:
    content = json.dumps({"case": rubric.number(RULES, task, output), "score": 0.75, "confidence": 0.5})
    usage = {"prompt_tokens": 100, "completion_tokens": 10}
    return json.dumps({"choices": [{"message": {"content": content}}], "usage": usage}).encode()


@pytest.mark.parametrize(
    ("scripts", "failure", "tries"),
    [
        ([answer(good())], None, 1),
        ([answer(b"", 503), answer(good())], None, 2),
        ([answer(b"busy", 429)], "unavailable", 2),
        ([answer(b"", 500), stream(b"x", then="cut")], "unavailable", 2),
        ([answer(b"no such model", 404)], "refused: 404", 1),
        ([answer(b"<html>")], "unreadable", 1),
        ([answer(good(output="another"))], "unreadable", 1),
    ],
)
async def test_what_a_judge_answers_and_how_often_it_is_asked(
    tmp_path: Path, scripts: list[Any], failure: str | None, tries: int
) -> None:
    async with serving(*scripts) as server:
        found = await judge(tmp_path, server.url, key="secret").judge("{}", "said", {})
    assert (found.failure, found.value) == (failure, None if failure else 0.75)
    assert len(server.requests) == tries
    assert all("authorization: bearer secret" in head.lower() for head, _ in server.requests)


async def test_a_judge_that_says_nothing_is_a_timeout(tmp_path: Path) -> None:
    async with serving(stream(b"{", then="hang")) as server:
        found = await judge(tmp_path, server.url, timeout_s=0.3).judge("{}", "said", {})
    assert found.failure == "timeout"


async def test_a_judge_that_is_down_is_unavailable(tmp_path: Path) -> None:
    found = await judge(tmp_path, "http://127.0.0.1:9/v1").judge("{}", "said", {})
    assert (found.value, found.failure) == (None, "unavailable")


async def test_its_verdict_is_a_reward_with_confidence_version_and_cost(tmp_path: Path) -> None:
    task = '{"numbers": "312"}'
    episode = Episode("r1", ticket=5, size=2, sample=1, task=task)
    episode.start()
    async with serving(answer(good(task))) as server:
        asked = judge(tmp_path, server.url, price_prompt=10.0)
        judging = Judge(asked, Evaluator("verifier", asked.version, "2", independent=False), "p", clock=lambda: 99)
        ended = codec.encode("Event", episode.end(output="said"))
        out = await judging(Record("ns.events", 0, 3, b"local/g", ended, {"kind": b"episode_ended"}, 0))
    assert out is not None
    reward = codec.decode_body("reward", codec.decode_as("Event", out.value or b"")["body"])
    assert (reward["value"], reward["confidence"], reward["signal"]) == (0.75, 0.5, "judge")
    assert reward["source_version"] == rubric.version("m", RULES)
    assert (reward["rubric_version"], reward["independent"]) == ("2", False)
    assert reward["components"]["judge.cost"] == pytest.approx(0.001)


@pytest.mark.parametrize("missing", ["url", "model", "rubric"])
def test_what_a_judge_lacks_is_said_at_once(tmp_path: Path, missing: str) -> None:
    (tmp_path / "rubric.md").write_text(RULES)
    given = {"url": "http://x/v1", "model": "m", "rubric": str(tmp_path / "rubric.md")} | {missing: ""}
    with pytest.raises(RewardError, match=missing):
        choose(Reward(verifier="judge", judge=RewardJudge(**given)))


@pytest.mark.parametrize("text", [None, b"", b"\xff"])
def test_a_rubric_that_cannot_be_read_is_said_at_once(tmp_path: Path, text: bytes | None) -> None:
    if text is not None:
        (tmp_path / "rubric.md").write_bytes(text)
    options = RewardJudge(url="http://x/v1", model="m", rubric=str(tmp_path / "rubric.md"))
    with pytest.raises(RewardError, match=r"rubric\.md"):
        AskedJudge(options, 1.0)


def test_a_judge_that_is_trained_by_its_own_verdicts_is_not_independent() -> None:
    reward = Reward(verifier="judge", judge=RewardJudge(independent=False))
    assert not independent(reward)
    assert independent(reward, "exact")
