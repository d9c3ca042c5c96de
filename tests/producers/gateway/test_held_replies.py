"""Shapes, forced tools and penalties over real HTTP in every API: served, passed to the engine, and labelled; strict
gateways refuse them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from millrace.dialects.rendering.template import TemplateRenderer
from millrace.infra.errors import EngineRejected
from tests.support.gateway_world import ScriptedEngine, World, world

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
JSON = '{"a": 3}'
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 3}}\n</tool_call>'
FUNCTION = {"name": "f", "parameters": SCHEMA}
CHAT_TOOLS = {"tools": [{"type": "function", "function": FUNCTION}]}
RESPONSES_TOOLS = {"tools": [{"type": "function", **FUNCTION}]}
MESSAGES_TOOLS = {"tools": [{"name": "f", "input_schema": SCHEMA}]}
FORMAT = {"type": "json_schema", "name": "n", "schema": SCHEMA}
ALLOWED = {"mode": "required", "tools": [{"type": "function", "function": {"name": "f"}}]}

SHAPED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": FORMAT}}, "response_format"),
    (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
    (RESPONSES, {"text": {"format": FORMAT}}, "text.format"),
    (RESPONSES, {"text": {"format": {"type": "json_object"}}}, "text.format"),
    (MESSAGES, {"output_config": {"format": FORMAT}}, "output_config"),
    (MESSAGES, {"output_format": FORMAT}, "output_format"),
]
FORCED: list[tuple[str, dict[str, Any], bool]] = [
    (CHAT, {**CHAT_TOOLS, "tool_choice": "required"}, True),
    (CHAT, {**CHAT_TOOLS, "tool_choice": "required", "parallel_tool_calls": False}, False),
    (CHAT, {**CHAT_TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, False),
    (CHAT, {**CHAT_TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": ALLOWED}}, False),
    (RESPONSES, {**RESPONSES_TOOLS, "tool_choice": "required"}, True),
    (RESPONSES, {**RESPONSES_TOOLS, "tool_choice": {"type": "function", "name": "f"}}, False),
    (MESSAGES, {**MESSAGES_TOOLS, "tool_choice": {"type": "any"}}, True),
    (MESSAGES, {**MESSAGES_TOOLS, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}, False),
    (MESSAGES, {**MESSAGES_TOOLS, "tool_choice": {"type": "tool", "name": "f"}}, False),
]
ALTERED: list[tuple[dict[str, Any], Any]] = [
    ({"presence_penalty": 0.5}, 0.5),
    ({"frequency_penalty": -0.5}, -0.5),
    ({"repetition_penalty": 1.5}, 1.5),
    ({"min_p": 0.25}, 0.25),
    ({"logit_bias": {"5": 1, "7": -100}}, ((5, 1.0), (7, -100.0))),
]
NEUTRAL = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "min_p": 0, "logit_bias": {}}
UNKNOWN = [
    (CHAT, "Unrecognized request argument supplied: thinking_budget"),
    (RESPONSES, "Unknown parameter: 'thinking_budget'."),
    (MESSAGES, "thinking_budget: Extra inputs are not permitted"),
]


def engine_of(renderer: TemplateRenderer) -> ScriptedEngine:
    engine = ScriptedEngine(lambda *_: renderer.tokenizer.encode(engine.says + "<|im_end|>"))
    engine.says = "It is 3."
    return engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def w(tmp_path_factory: pytest.TempPathFactory, renderer: TemplateRenderer) -> AsyncIterator[World]:
    async with world(tmp_path_factory.mktemp("lenient"), renderer, engine_of(renderer)) as w:
        yield w


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def strict(tmp_path_factory: pytest.TempPathFactory, renderer: TemplateRenderer) -> AsyncIterator[World]:
    async with world(tmp_path_factory.mktemp("strict"), renderer, engine_of(renderer), strict=True) as w:
        yield w


async def post(w: World, path: str, **fields: Any) -> Any:
    said: dict[str, Any] = {"input": "hi"} if path == RESPONSES else {"messages": [{"role": "user", "content": "hi"}]}
    given = {"model": "m", **({"max_tokens": 60} if path == MESSAGES else {}), **said, **fields}
    return await w.http.post(path, json=given)


async def served(w: World, path: str, says: str, reason: str | None, **fields: Any) -> Any:
    """The reply to a request that is served, once its record is as it should be."""
    w.engine.says = says
    answer = await post(w, path, **fields)
    assert answer.status_code == 200, answer.text
    call = w.calls()[-1]
    assert (call["trainable"], call["untrainable_reason"]) == (reason is None, reason)
    assert json.loads(call["request"]).items() >= fields.items()
    return answer.json()


@pytest.mark.parametrize(("path", "fields", "param"), SHAPED)
async def test_a_shape_is_passed_on_and_labelled(w: World, strict: World, path: str, fields: Any, param: str) -> None:
    answer = await served(w, path, JSON, "constrained", **fields)
    assert JSON in json.dumps(answer).replace('\\"', '"')
    grammar = w.engine.asked[-1].sampling.grammar
    wanted = {"type": "object"} if "json_object" in json.dumps(fields) else SCHEMA
    assert json.loads(grammar.text)["format"]["elements"][-1] == {"type": "json_schema", "json_schema": wanted}
    refused = await post(strict, path, **fields)
    assert (refused.status_code, param in refused.json()["error"]["message"]) == (400, True)


@pytest.mark.parametrize(("path", "fields", "several"), FORCED)
async def test_a_forced_call_is_passed_on_and_labelled(
    w: World, strict: World, path: str, fields: Any, several: bool
) -> None:
    answer = await served(w, path, CALL, "constrained", **fields)
    assert '"f"' in json.dumps(answer)
    calls = json.loads(w.engine.asked[-1].sampling.grammar.text)["format"]["elements"][-1]
    assert (calls["type"], len(calls["tags"]), calls["stop_after_first"]) == ("tags_with_separator", 1, not several)
    refused = await post(strict, path, **fields)
    assert (refused.status_code, "tool_choice" in refused.json()["error"]["message"]) == (400, True)


@pytest.mark.parametrize(("fields", "value"), ALTERED)
async def test_altered_sampling_is_passed_on_and_labelled(w: World, strict: World, fields: Any, value: Any) -> None:
    ((param, _),) = fields.items()
    await served(w, CHAT, "It is 3.", "altered_sampling", **fields)
    assert getattr(w.engine.asked[-1].sampling, param) == value
    refused = await post(strict, CHAT, **fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("says", ["w", "strict"])
async def test_what_changes_nothing_trains(says: str, request: pytest.FixtureRequest) -> None:
    asked = {**CHAT_TOOLS, "tool_choice": "auto", "response_format": {"type": "text"}, **NEUTRAL}
    await served(request.getfixturevalue(says), CHAT, "It is 3.", None, **asked)


@pytest.mark.parametrize(("path", "said"), UNKNOWN)
async def test_an_unknown_field_is_kept_and_strict_gateways_refuse_it(
    w: World, strict: World, path: str, said: str
) -> None:
    await served(w, path, "It is 3.", None, thinking_budget=9)
    refused = await post(strict, path, thinking_budget=9)
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, said)
    assert (await post(strict, path)).status_code == 200


async def test_what_an_engine_does_not_hold_to_is_told_in_the_apis_shape(tmp_path: Path, renderer: Any) -> None:
    engine = engine_of(renderer)
    engine.error = EngineRejected("no such schema", 400)
    async with world(tmp_path, renderer, engine) as w:
        for path, fields, _ in SHAPED:
            refused = await post(w, path, **fields)
            assert (refused.status_code, "no such schema" in refused.json()["error"]["message"]) == (400, True)
        assert w.calls() == []
