"""Shapes and forced calls on real vLLM: a random model, which would never write them by itself, is held to them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import openai
import pytest

from millrace.dialects.rendering.template import TemplateRenderer
from millrace.dialects.rendering.tokenizer import ChatTokenizer
from millrace.infra.engines.vllm.engine import VllmEngine
from millrace.infra.engines.vllm.launch import Vllm
from tests.support import chat_tokenizer
from tests.support.gateway_world import world

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(900)]

USER: Any = [{"role": "user", "content": "1 + 2"}]
COLOUR = {"type": "object", "properties": {"colour": {"enum": ["red", "green"]}}, "required": ["colour"]}
CLOSED = {**COLOUR, "additionalProperties": False}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": CLOSED}} for name in ("paint", "wash")
]  # fmt: skip


def with_markers(model: Path, folder: Path) -> Path:
    """The engine's tokenizer, two of whose tokens are the marks of tool calls, and a template that writes them."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / name).read_text()
        for token, mark in (("<|x510|>", "<tool_call>"), ("<|x511|>", "</tool_call>")):
            text = text.replace(token, mark)
        (folder / name).write_text(text)
    (folder / "chat_template.jinja").write_text(chat_tokenizer.TEMPLATE)
    return folder


async def test_a_random_model_is_held_to_shapes_and_calls(vllm: Vllm, tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(with_markers(Path(vllm.model), tmp_path / "model"))
    assert (tokenizer.convert_tokens_to_ids("<tool_call>"), tokenizer.convert_tokens_to_ids("</tool_call>")) == (
        510,
        511,
    )
    # Between the parts of JSON a random model would write white space for ever.
    white = {str(id): -100 for id in range(tokenizer.core.get_vocab_size()) if not tokenizer.decode([id]).strip()}
    engine = VllmEngine(vllm.url, "tiny")
    async with world(tmp_path / "gateway", TemplateRenderer(tokenizer), engine, max_model_len=512) as w:
        client = w.kept(openai.AsyncOpenAI(base_url=f"{w.url}/v1", api_key="x", max_retries=0))
        chat, schema = client.chat.completions, {"name": "c", "schema": CLOSED}
        shaped = await chat.create(
            model="m", messages=USER, response_format={"type": "json_schema", "json_schema": schema},
            logit_bias=white, presence_penalty=0.5, extra_body={"min_p": 0.01, "repetition_penalty": 1.1},
        )  # fmt: skip
        assert json.loads(shaped.choices[0].message.content or "")["colour"] in ("red", "green")
        async with chat.stream(
            model="m", messages=USER, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, logit_bias=white
        ) as stream:
            forced = await stream.get_final_completion()
        named: Any = {"type": "function", "function": {"name": "wash"}}
        wash = await chat.create(
            model="m", messages=USER, tools=TOOLS, tool_choice=named, logit_bias=white, top_logprobs=3, logprobs=True
        )
        for reply in (forced, wash):
            (call,) = reply.choices[0].message.tool_calls or ()
            assert call.type == "function"
            assert json.loads(call.function.arguments)["colour"] in ("red", "green")
        assert call.function.name == "wash"
        bad: Any = {"name": "b", "schema": {"type": "object", "properties": {"a": {"type": "no such type"}}}}
        with pytest.raises(openai.BadRequestError):
            await chat.create(
                model="m", messages=USER, response_format={"type": "json_schema", "json_schema": bad}, max_tokens=20
            )
        pushed = await chat.create(model="m", messages=USER, logit_bias={"5": 100}, max_tokens=4)
        assert [call["untrainable_reason"] for call in w.calls()] == ["constrained"] * 3 + ["altered_sampling"]
        assert pushed.choices[0].message.content == tokenizer.decode([5] * 4)
        await engine.close()
