"""Every API asks a judge the same and is read alike, as its own clients write requests and its servers answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.dialects.all import by_name
from millrace.dialects.reading.reader import ROOT
from millrace.infra.config import RewardJudge
from millrace.streams.reward import rubric
from millrace.streams.reward.asking import AskedJudge
from millrace.streams.reward.dialects import APIS
from tests.support.fake_http import answer, serving

TEXT = st.text(max_size=40)
each = pytest.mark.parametrize("speaks", sorted(APIS))


def replied(speaks: str, text: str) -> dict[str, Any]:
    """As servers of that API answer, with thoughts, and a prompt of 100 tokens of which 40 came from a cache."""
    if speaks == "chat":
        usage = {"prompt_tokens": 100, "completion_tokens": 10, "prompt_tokens_details": {"cached_tokens": 40}}
        message = {"role": "assistant", "content": text, "reasoning_content": "hm"}
        return {"id": "c", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage}
    if speaks == "messages":
        content = [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": text}]
        usage = {"input_tokens": 50, "cache_read_input_tokens": 40, "cache_creation_input_tokens": 10}
        return {"type": "message", "content": content, "usage": {**usage, "output_tokens": 10}}
    half = len(text) // 2
    parts = [{"type": "output_text", "text": said, "annotations": []} for said in (text[:half], text[half:])]
    output = [
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": parts},
    ]
    usage = {"input_tokens": 100, "input_tokens_details": {"cached_tokens": 40}, "output_tokens": 10}
    return {"object": "response", "status": "completed", "output": output, "usage": usage}


@each
@given(TEXT, TEXT, TEXT)
def test_a_judge_is_asked_the_same_in_every_api(speaks: str, rules: str, task: str, output: str) -> None:
    """As the gateway, which speaks them all, reads it."""
    body = rubric.request(rules, "m", task, output, 64, APIS[speaks])
    ask = by_name(speaks).parse(body)
    system, user = ask.turns
    said = [part.text for turn in (system, user) for part in turn.parts]  # type: ignore[union-attr]
    assert (system.role, user.role, said[0]) == ("system", "user", rubric.INSTRUCTIONS + rules)
    assert json.loads(said[1]) == {"case": rubric.number(rules, task, output), "task": task, "output": output}
    assert (ask.model, ask.max_tokens, ask.temperature) == ("m", 64, 0)
    assert APIS[speaks].path == by_name(speaks).path.removeprefix(ROOT)


@each
async def test_its_reply_is_a_verdict_with_what_it_cost(tmp_path: Path, speaks: str) -> None:
    (tmp_path / "rubric.md").write_text("r")
    said = json.dumps({"case": rubric.number("r", "{}", "said"), "score": 0.75, "confidence": 0.5})
    made: dict[str, Any] = {"url": "http://x", "model": "m", "key": "secret", "key_header": "x-api-key"}
    async with serving(answer(json.dumps(replied(speaks, said)).encode())) as server:
        options = RewardJudge(
            **{**made, "url": f"{server.url}/v1"}, speaks=speaks, rubric=str(tmp_path / "rubric.md"), price_prompt=10.0
        )
        found = await AskedJudge(options, 60).judge("{}", "said", {})
    ((head, _),) = server.requests
    assert head.startswith(f"POST /v1{APIS[speaks].path} ")
    assert "x-api-key: secret" in head.lower()
    assert ("anthropic-version" in head.lower()) is (speaks == "messages")
    assert (found.value, found.confidence, found.failure) == (0.75, 0.5, None)
    spent = {"judge.prompt_tokens": 100.0, "judge.completion_tokens": 10.0, "judge.cost": pytest.approx(0.001)}
    assert found.components == spent


@each
@given(data=st.data())
def test_no_reply_of_any_api_raises_and_each_is_paid_for(speaks: str, data: st.DataObject) -> None:
    """Something odd in the place of one of its values, however deep."""
    odd = data.draw(st.none() | st.integers() | st.booleans() | TEXT | st.just([]) | st.just([{}]) | st.just({}))
    body = replied(speaks, "I give 1.0")
    field = data.draw(st.sampled_from(sorted(body)))
    assert rubric.verdict(json.dumps({**body, field: odd}).encode(), "0" * 16, api=APIS[speaks]).value is None
    if field != "usage":
        spent = rubric.verdict(json.dumps({**body, field: odd}).encode(), "0" * 16, api=APIS[speaks]).components
        assert spent == {"judge.prompt_tokens": 100.0, "judge.completion_tokens": 10.0}
    garbage = data.draw(st.binary(max_size=30))
    assert rubric.verdict(garbage, "0" * 16, api=APIS[speaks]).failure == "unreadable"
