"""An agent of Anthropic's Messages on a real engine: five turns with a tool, whole and streamed in turn, one lineage
whose tokens are those that the model knows by heart. The engine is the light one, and vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from millrace.dialects.rendering.template import TemplateRenderer
from millrace.dialects.rendering.tokenizer import ChatTokenizer
from millrace.infra.engines.vllm.control import VllmControl
from millrace.infra.engines.vllm.engine import VllmEngine
from millrace.schemas.arrays import unpack
from tests.support import tool_model
from tests.support.engines import LightEngine
from tests.support.gateway_world import world

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TOOL = {"name": "add", "input_schema": {"type": "object"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_model.write(tmp_path_factory.mktemp("models"))[0]


@pytest.fixture(params=["light", pytest.param("vllm", marks=pytest.mark.vllm)])
async def engine_url(request: pytest.FixtureRequest, model: Path, tmp_path: Path) -> AsyncIterator[str]:
    """Of a server that has the tool model. The shared one gets its own back."""
    if request.param == "light":
        light = LightEngine(model, tmp_path / "engine.log")
        await asyncio.to_thread(light.start)
        yield light.url
        light.kill()
        return
    shared = request.getfixturevalue("vllm")
    control = VllmControl(shared.url)
    await loaded(control, model, "policy@0")
    yield shared.url
    await loaded(control, Path(shared.model), "default")
    await control.close()


async def loaded(control: VllmControl, folder: Path, label: str) -> None:
    await control.pause("keep")
    await control.load(folder)
    await control.set_version(label)
    assert await control.reset_prefix_cache()
    await control.resume()


async def test_an_agent_goes_on_from_exact_tokens(engine_url: str, model: Path, tmp_path: Path) -> None:
    renderer = TemplateRenderer(ChatTokenizer(model))
    async with world(tmp_path / "gateway", renderer, VllmEngine(engine_url), max_model_len=512) as w:
        session = await w.start()
        client = w.kept(anthropic.AsyncAnthropic(base_url=w.url, api_key=session["api_key"], max_retries=0))
        messages: list[Any] = [tool_model.USER]
        for turn in range(1, tool_model.TURNS + 1):
            given: Any = {"model": "m", "messages": messages, "tools": [TOOL], "max_tokens": 4096}
            if turn % 2:
                message = await client.messages.create(**given)
            else:
                async with client.messages.stream(**given) as stream:
                    message = await stream.get_final_message()
            calls = [block for block in message.content if block.type == "tool_use"]
            if not calls:
                break
            assert [call.input for call in calls] == [{"b": turn, "a": 4.0}]
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": tool_model.tool_result(turn)}
                for call in calls
            ]
            messages = [*messages, {"role": "assistant", "content": message.content}]
            messages = [*messages, {"role": "user", "content": results}]
        assert (turn, message.content[0].text, message.stop_reason) == (tool_model.TURNS, "Done.", "end_turn")
        recorded = w.calls(session["session"])
        await w.engine.close()
    sampled = [tool_model.reply_ids(renderer.tokenizer, turn) for turn in range(1, tool_model.TURNS + 1)]
    assert [unpack(call["output_ids"]).tolist() for call in recorded] == sampled
    assert [call["opened"] for call in recorded[1:]] == [None] * (tool_model.TURNS - 1)
    tokens = [id for call in recorded for part in ("prompt_ids", "output_ids") for id in unpack(call[part]).tolist()]
    assert tokens == tool_model.conversation(renderer)[0]
    assert all(call["trainable"] for call in recorded)
