"""What a model or a client writes, and what could keep a gateway from starting again: sent to a real process, which is
killed behind it. Each call was answered, the gateway starts, and each conversation goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from millrace.dialects.rendering.tokenizer import ChatTokenizer
from millrace.infra.log.kafka.bus import KafkaBus
from millrace.schemas import codec
from tests.producers.test_processes import USER, Deployment, until
from tests.support import chat_tokenizer
from tests.support.instant_engine import InstantEngine, serving

pytestmark = [pytest.mark.slow, pytest.mark.kafka]

NUMBERS = ("18446744073709551616", "12345678901234567890123", "1e20", "-1e19", "1e308", "9" * 310)
DEPTHS = (65, 254, 1_100)
ARGUMENTS = [f'{{"account": {number}}}' for number in NUMBERS] + [f'{{"a": {"[" * n}{"]" * n}}}' for n in DEPTHS]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "maximum": 1e20}}}
BODIES = [f'{{"group_size": {2**63}}}', f'{{"task": {"[" * 600}{"]" * 600}}}', f'{{"task_id": "{"x" * 1_500_000}"}}']
"""starts of sessions that are refused"""


async def test_a_gateway_starts_again_whatever_was_written(broker: str, tmp_path: Path) -> None:
    tokenizer = chat_tokenizer.write(tmp_path / "tokenizer")
    encode = ChatTokenizer(tokenizer).encode
    replies = iter(ARGUMENTS)

    def script(prompt: list[int]) -> list[int]:
        arguments = next(replies, None)
        call = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
        return encode(f"{call if arguments else 'well'}<|im_end|>")

    async with serving(InstantEngine(script)) as engine, httpx.AsyncClient(timeout=120) as http:
        with KafkaBus(broker) as bus:
            d = Deployment(bus, broker, tmp_path, engine, tokenizer, "pills")

            async def chat(messages: list[dict[str, Any]], key: str) -> httpx.Response:
                body = {"model": "m", "messages": messages, "tools": [TOOL]}
                headers = {"authorization": f"Bearer {key}"}
                return await http.post(f"{d.url}/v1/chat/completions", json=body, headers=headers)

            said: dict[str, list[dict[str, Any]]] = {}
            with d.process("millrace.producers.gateway.serve"):
                await d.answers(http)
                for body in BODIES:
                    assert (await http.post(f"{d.url}/v1/sessions", content=body)).status_code == 400
                for _ in ARGUMENTS:
                    session = (await http.post(f"{d.url}/v1/sessions", json={})).json()
                    answer = await chat([USER], session["api_key"])
                    assert answer.status_code == 200, answer.text
                    said[session["api_key"]] = [USER, answer.json()["choices"][0]["message"], USER]
            with d.process("millrace.producers.gateway.serve"):
                await d.answers(http)
                d.acknowledge()
                for key, messages in said.items():
                    answer = await chat(messages, key)
                    assert answer.status_code == 200, answer.text
                wanted = 3 * len(said)
                await until(lambda: len(d.raw()) >= wanted)
            calls = [codec.decode_body("model_call", e["body"]) for e in d.raw() if e["kind"] == "model_call"]
            opened = [call["opened"] for call in calls]
            assert len(opened) == 2 * opened.count(None) == 2 * len(said), "each goes on"
            assert all(json.loads(call["response"]) for call in calls)
