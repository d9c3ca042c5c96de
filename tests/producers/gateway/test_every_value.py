"""Numbers, levels and names of every size: a call is answered and captured, or refused by the name of the bound."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.dialects import match_keys, shape
from millrace.dialects.rendering.template import TemplateRenderer
from millrace.schemas import bounds
from tests.support.gateway_world import ScriptedEngine, world
from tests.support.in_process import InProcess, Played

USER = {"role": "user", "content": "hi"}
LONG = {"model": "m", "max_tokens": 500}
CHAT = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
NUMBERS = ["18446744073709551616", "12345678901234567890123", "1e20", "-1e19", "1e308", "9" * 310, "0.5", "1.0"]
DEPTHS = [64, 65, 254, 300, 900, 1100, 5000]

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def answering(renderer: TemplateRenderer, text: str) -> ScriptedEngine:
    return ScriptedEngine(lambda *_: renderer.tokenizer.encode(f"{text}<|im_end|>"))


@pytest.mark.parametrize(
    "arguments", [f'{{"account": {n}}}' for n in NUMBERS] + [f'{{"a": {nested(d)}}}' for d in DEPTHS]
)
async def test_a_model_may_write_any_arguments(tmp_path: Path, renderer: TemplateRenderer, arguments: str) -> None:
    engine = answering(renderer, f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>')
    async with world(tmp_path, renderer, engine, max_model_len=100_000) as w:
        session = await w.start()
        answer = await w.chat([USER], session["api_key"], tools=[TOOL])
        assert answer.status_code == 200, answer.text
        reply = answer.json()["choices"][0]["message"]
    async with world(tmp_path, renderer, engine, max_model_len=100_000) as w:
        assert w.gateway.sessions.unreadable == set()
        more = [USER, reply, {"role": "user", "content": "and?"}]
        answer = await w.chat(more, session["api_key"], tools=[TOOL])
        assert answer.status_code == 200, answer.text
        first, second = w.calls(session["session"])
        assert second["lineage"] == first["lineage"], second["opened"]


@pytest.mark.parametrize("number", NUMBERS)
async def test_a_tool_schema_may_hold_any_number(tmp_path: Path, renderer: TemplateRenderer, number: str) -> None:
    schema = json.dumps(TOOL).replace('"object"', f'"object", "maximum": {number}')
    body = f'{{"model": "m", "messages": [{json.dumps(USER)}], "tools": [{schema}]}}'
    async with world(tmp_path, renderer, answering(renderer, "x")) as w:
        answer = await w.http.post(CHAT, content=body)
        assert answer.status_code == 200, answer.text
        (call,) = w.calls()
        assert call["request"] == body.encode()
    async with world(tmp_path, renderer, answering(renderer, "x")) as w:
        assert len(w.gateway.sessions.live) == 1


REFUSED: list[tuple[str, str, str]] = [
    ("seed", CHAT, f'{{"model":"m","messages":[],"seed":{2**70}}}'),
    ("max_tokens", CHAT, '{"model":"m","messages":[],"max_tokens":1e30}'),
    ("top_k", CHAT, '{"model":"m","messages":[],"top_k":1e20}'),
    ("n", CHAT, json.dumps({"model": "m", "messages": [USER], "n": 0})),
    ("stop", CHAT, json.dumps({"model": "m", "messages": [USER], "stop": "x" * 2000})),
    ("levels", CHAT, f'{{"model":"m","messages":[],"metadata":{{"a":{nested(500)}}}}}'),
    ("levels", CHAT, f'{{"model":"m","messages":[],"tools":[{{"a":{nested(300)}}}]}}'),
    ("values", CHAT, f'{{"model":"m","messages":[],"tools":[{"{}," * 100_000}{{}}]}}'),
    ("1024 bytes", CHAT, json.dumps({"model": "m", "messages": [{**USER, "name": "ü" * 513}]})),
    ("logprobs", CHAT, json.dumps({**LONG, "messages": [USER], "logprobs": True, "top_logprobs": 19, "n": 128})),
    ("group_size", "/v1/sessions", '{"group_size": 4097}'),
    ("reward_deadline_ms", "/v1/sessions", '{"reward_deadline_ms": 9000000000000000000}'),
    ("min_version", "/v1/sessions", '{"min_version": 1e30}'),
    ("deadline", "/v1/sessions", f'{{"deadline": {2**64}}}'),
    ("budget", "/v1/sessions", f'{{"budget": {{"turns": {2**63}}}}}'),
    ("task_id", "/v1/sessions", json.dumps({"task_id": "x" * 1025})),
    ("awaits", "/v1/sessions", json.dumps({"awaits": ["x"] * 257})),
    ("levels", "/v1/sessions", f'{{"task": {nested(65)}}}'),
    ("1024 bytes", "/v1/sessions/S/events",
     '{"events":[{"kind":"security_label","classification":"public","labels":["L"]}]}'),
    ("latency_us", "/v1/sessions/S/events",
     '{"events":[{"kind":"tool_result","name":"f","call_id":"c","content":"","latency_us":9e15}]}'),
    ("value", "/v1/sessions/S/reward", '{"value": 1e30}'),
    ("components", "/v1/sessions/S/reward", '{"value": 1, "components": {"a": 1e7}}'),
    ("span_end", "/v1/sessions/S/reward", '{"value": 1, "span_start": 5, "span_end": 3}'),
]  # fmt: skip


@pytest.mark.parametrize(("named", "path", "body"), REFUSED, ids=[f"{row[1][4:9]} {row[0]}" for row in REFUSED])
async def test_what_is_beyond_a_bound_is_refused_by_its_name(
    tmp_path: Path, renderer: TemplateRenderer, named: str, path: str, body: str
) -> None:
    gateway = InProcess(tmp_path, renderer, lambda _: Played(500), max_model_len=100_000)
    session = (await gateway.ask("POST", "/v1/sessions")).json["session"]
    body = body.replace('"L"', json.dumps("L" * 2000))
    answer = await gateway.ask("POST", path.replace("/S/", f"/{session}/"), body.encode())
    assert answer.status == 400, answer
    error = answer.json["error"]
    assert named in f"{error['message']} {error['param']}", answer
    assert gateway.log.end == 1
    await gateway.close()


async def test_rewards_of_one_session_have_an_end(tmp_path: Path, renderer: TemplateRenderer) -> None:
    gateway = InProcess(tmp_path, renderer, lambda _: Played(500))
    session = (await gateway.ask("POST", "/v1/sessions")).json["session"]
    path = f"/v1/sessions/{session}/reward"
    statuses = [(await gateway.ask("POST", path, b'{"value": 1}')).status for _ in range(bounds.REWARDS + 1)]
    assert statuses == [200] * bounds.REWARDS + [400]
    await gateway.close()


@given(JSON)
def test_every_value_has_a_key(value: Any) -> None:
    assert match_keys.canonical(value) == match_keys.canonical(value)
    assert isinstance(match_keys.canonical_json(json.dumps(value)), bytes)


@given(st.integers(-(2**52), 2**52))
def test_whole_floats_and_integers_have_one_key(number: int) -> None:
    assert match_keys.canonical([number]) == match_keys.canonical([float(number)])


def test_a_long_number_has_the_same_key_beside_what_nests_too_deep_to_be_written() -> None:
    deep: list[Any] = []
    for _ in range(300):
        deep = [deep]
    number = 12345678901234567890123
    assert match_keys.canonical([number, deep]) == match_keys.canonical([float(number), deep])


def depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth, inner), default=0)


def count(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(1 + count(inner) for inner in value.values())
    return 1 + sum(map(count, value)) if isinstance(value, list) else 1


@given(JSON)
def test_the_shape_is_known_before_the_value(value: Any) -> None:
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=2)):
        found = shape.measure(text.encode(errors="replace"))
        assert found.depth == depth(value)
        assert found.values >= count(value)
