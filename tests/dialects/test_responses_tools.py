"""Functions in a namespace: one name for the model, two for its client, and the way back."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.dialects.errors import ApiError
from millrace.dialects.rendering.template import TemplateRenderer
from millrace.dialects.responses.tools import full_name, inside, tools_of
from millrace.infra.engines.base import Sampling
from millrace.schemas.arrays import unpack
from tests.support.gateway_world import ScriptedEngine, World, world

NAMES = st.sampled_from(["a", "b", "a__b", "b__a", "__", "b__"])
FUNCTION = st.builds(lambda name: {"type": "function", "name": name, "description": f"does {name}"}, NAMES)
SPACE = st.builds(
    lambda name, tools: {"type": "namespace", "name": name, "description": f"about {name}", "tools": tools},
    NAMES,
    st.lists(FUNCTION, max_size=3),
)


@given(st.lists(FUNCTION | SPACE, min_size=1, max_size=4))
def test_each_function_has_one_name_and_one_way_back(tools: list[dict[str, Any]]) -> None:
    said = [(None, tool["name"]) for tool in tools if tool["type"] == "function"]
    said += [(tool["name"], each["name"]) for tool in tools if tool["type"] == "namespace" for each in tool["tools"]]
    full = [full_name({"namespace": space}, name) for space, name in said]
    if len(set(full)) < len(full) and any(tool["type"] == "namespace" for tool in tools):
        with pytest.raises(ApiError, match="one name"):
            tools_of(tools)
        return
    found = tools_of(tools) or []
    assert sorted(tool["function"]["name"] for tool in found) == sorted(full)
    assert inside(tools) == {name: at for name, at in zip(full, said, strict=True) if at[0] is not None}
    for space in (tool for tool in tools if tool["type"] == "namespace" and tool["tools"]):
        assert sum(space["description"] in tool["function"]["description"] for tool in found) >= 1


CALLED = [("crm", "find", {"id": 7}), (None, "find", {"id": 8})]
TOOLS: list[Any] = [
    {"type": "function", "name": "find", "parameters": {"type": "object"}, "strict": False},
    {
        "type": "namespace",
        "name": "crm",
        "description": "customers",
        "tools": [{"type": "function", "name": "find", "parameters": {"type": "object"}}],
    },
]


@pytest.fixture
async def w(tmp_path: Path, renderer: TemplateRenderer) -> AsyncIterator[World]:
    def script(prompt: list[int], sampling: Sampling, choice: int) -> Sequence[int]:
        said = ({"name": full_name({"namespace": space}, name), "arguments": given} for space, name, given in CALLED)
        calls = "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in said)
        return renderer.tokenizer.encode(calls + "<|im_end|>")

    async with world(tmp_path, renderer, ScriptedEngine(script)) as w:
        yield w


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_a_client_is_told_the_namespace_and_echoes_it(w: World, stream: bool) -> None:
    client = w.kept(openai.AsyncOpenAI(base_url=f"{w.url}/v1", api_key=(await w.start())["api_key"], max_retries=0))
    talk: list[Any] = [{"role": "user", "content": "Both."}]
    for _ in range(2):
        if stream:
            async with client.responses.stream(model="m", input=talk, tools=TOOLS) as events:
                reply = await events.get_final_response()
        else:
            reply = await client.responses.create(model="m", input=talk, tools=TOOLS)
        told = [item for item in reply.output if item.type == "function_call"]
        assert [(item.namespace, item.name, json.loads(item.arguments)) for item in told] == CALLED
        talk += [*reply.output, *({"type": "function_call_output", "call_id": i.call_id, "output": "ok"} for i in told)]
    first, second = w.calls()
    former = [*unpack(first["prompt_ids"]), *unpack(first["output_ids"])]
    assert second["opened"] is None
    assert second["prefix_len"] == len(former)
    again = await client.responses.create(model="m", input="once more", previous_response_id=reply.id, tools=TOOLS)
    assert again.output
    assert w.calls()[-1]["opened"] is None


HOSTED = [
    ("/v1/responses", {"input": "hi", "tools": [{"type": "web_search"}, *TOOLS[:1]]}, "tools[0]"),
    (
        "/v1/messages",
        {
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 60,
            "tools": [{"type": "web_search_20250305", "name": "web_search"}],
        },
        "tools.0",
    ),
]


@pytest.mark.parametrize(("path", "fields", "place"), HOSTED)
async def test_tools_that_only_the_api_could_run_are_not_shown(
    w: World, tmp_path: Path, renderer: TemplateRenderer, path: str, fields: dict[str, Any], place: str
) -> None:
    assert (await w.http.post(path, json={"model": "m", **fields})).status_code == 200
    assert "web_search" not in renderer.tokenizer.decode(w.engine.asked[0].prompt)
    async with world(tmp_path / "strict", renderer, w.engine, strict=True) as strict:
        refused = await strict.http.post(path, json={"model": "m", **fields})
        assert (refused.status_code, place in refused.text) == (400, True)
