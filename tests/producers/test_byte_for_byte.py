"""What the engine sampled is what the learner's step computes on: id by id, log-probability by log-probability.

The witness is a recording proxy between gateway and engine, never the gateway's own records. The agent runs five turns
with a tool, drops the model's thoughts, writes the tool arguments anew, and the weights change in the middle of a
streamed reply."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
from aiohttp import web

from consumers.reloader.vllm import VllmControl
from infra.config import Governance
from infra.services.net import free_ports
from producers.client import AsyncSession
from producers.engines.vllm import VllmEngine
from producers.gateway.rendering.template import TemplateRenderer
from producers.gateway.rendering.tokenizer import ChatTokenizer
from streams.refine.stage import Refine
from streams.seal.stage import Seal
from tests.support import gateway_world, tool_model
from tests.support.engines import LightEngine
from tests.support.world import CALM, World
from trainers.batches.packing import pack
from trainers.batches.sample import samples_of

pytestmark = pytest.mark.slow

TOPICS = {
    "raw": 2,
    "events": 2,
    "dead-letters": 2,
    "policy.trajectories": 2,
    "policy.evaluations": 2,
    "policy.completions": 1,
    "decisions": 1,
}
SWAP_IN = 3
"""the reply in whose middle the weights change"""
ATTEMPTS = 12
"""A reply is short: on a busy machine it may be over before the engine hears of the new weights."""


@dataclass
class Proxy:
    """Passes generate requests to `engine` and keeps what came back, as it came."""

    engine: str
    swap: Any
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    answers: list[bytes] = field(default_factory=list)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.requests.append(json.loads(body))
        number = len(self.answers)
        self.answers.append(b"")
        async with (
            aiohttp.ClientSession() as http,
            http.post(
                f"{self.engine}/inference/v1/generate", data=body, headers={"content-type": "application/json"}
            ) as got,
        ):
            answer = web.StreamResponse(status=got.status, headers={"content-type": got.content_type})
            await answer.prepare(request)
            swapped = False
            async for part in got.content.iter_any():
                self.answers[number] += part
                await answer.write(part)
                if number == SWAP_IN - 1 and not swapped and self.answers[number].count(b"data: ") >= 6:
                    swapped = True
                    await self.swap()
            return answer

    @property
    def swapped_within(self) -> bool:
        """Whether both versions sampled the reply in which the weights were to change."""
        return set(self.returned(SWAP_IN - 1)[2]) == {0, 1}

    def returned(self, number: int) -> tuple[list[int], list[float], list[int]]:
        """(ids, log-probabilities, versions) of one answer."""
        raw = self.answers[number]
        parts = [part[6:] for part in raw.split(b"\n\n") if part.startswith(b"data: {")] or [raw]
        ids: list[int] = []
        logprobs: list[float] = []
        spans: list[dict[str, Any]] = []
        for choice in (choice for part in parts for choice in json.loads(part).get("choices", ())):
            ids += choice.get("token_ids") or []
            logprobs += [token["logprob"] for token in (choice.get("logprobs") or {}).get("content") or ()]
            spans += choice.get("weight_versions") or ()
        versions = [int(s["version"].partition("@")[2]) for s in spans for _ in range(s["start"], s["end"])]
        return ids, logprobs, versions


@asynccontextmanager
async def proxied(engine: str, swap: Any) -> AsyncIterator[Proxy]:
    proxy, app = Proxy(engine, swap), web.Application(client_max_size=2**24)
    app.add_routes([web.post("/inference/v1/generate", proxy.generate)])
    runner = web.AppRunner(app)
    await runner.setup()
    (port,) = free_ports(1)
    await web.TCPSite(runner, "127.0.0.1", port).start()
    proxy.url = f"http://127.0.0.1:{port}"
    try:
        yield proxy
    finally:
        await runner.cleanup()


async def agent(base_url: str, api_key: str) -> str | None:
    """Five turns. Keeps no thoughts, and writes arguments as its own JSON library does."""
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    messages: list[Any] = [tool_model.USER]
    for turn in range(1, tool_model.TURNS + 1):
        stream = turn == SWAP_IN
        answer = await client.chat.completions.create(
            model="m", messages=messages, tools=tool_model.TOOLS, stream=stream
        )
        content, calls = await _streamed(answer) if stream else _plain(answer)
        if not calls:
            return content
        echoed = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": _anew(arguments)}}
            for id, name, arguments in calls
        ]
        messages.append({"role": "assistant", "content": content, "tool_calls": echoed})
        messages += [{"role": "tool", "tool_call_id": id, "content": tool_model.tool_result(turn)} for id, *_ in calls]
    return None


def _anew(arguments: str) -> str:
    return json.dumps(json.loads(arguments), sort_keys=True, separators=(",", ":"))


def _plain(answer: Any) -> tuple[str | None, list[tuple[str, str, str]]]:
    message = answer.choices[0].message
    return message.content, [(c.id, c.function.name, c.function.arguments) for c in message.tool_calls or ()]


async def _streamed(answer: Any) -> tuple[str | None, list[tuple[str, str, str]]]:
    content, calls = "", []
    async for chunk in answer:
        delta = chunk.choices[0].delta
        content += delta.content or ""
        calls += [(c.id, c.function.name, c.function.arguments) for c in delta.tool_calls or ()]
    return content or None, calls


async def test_what_was_sampled_is_what_is_trained(tmp_path: Path) -> None:
    old, new = await asyncio.to_thread(tool_model.write, tmp_path)
    engine = LightEngine(old, tmp_path / "engine.log")
    await asyncio.to_thread(engine.start)
    control = VllmControl(engine.url)

    async def swap(folder: Path, version: int) -> None:
        await control.pause("keep")
        await control.load(folder)
        await control.set_version(f"policy@{version}")
        await control.reset_prefix_cache()
        await control.resume()

    try:
        for attempt in range(ATTEMPTS):
            await swap(old, 0)
            async with proxied(engine.url, partial(swap, new, 1)) as proxy:
                events = await _episode(tmp_path / f"gateway-{attempt}", old, proxy)
            if proxy.swapped_within:
                break
        await control.close()
    finally:
        engine.kill()
    _check(proxy, events)


async def _episode(home: Path, model: Path, proxy: Proxy) -> list[dict[str, Any]]:
    """Run the agent through a gateway that keeps its files in `home`; the events of its capture log."""
    renderer = TemplateRenderer(ChatTokenizer(model))
    behind = VllmEngine(proxy.url)
    async with gateway_world.world(home, renderer, behind, max_model_len=1024) as w:
        w.acknowledge(0)
        started = await w.start(ticket=1, group_size=1, min_version=0, awaits=["tests"])
        async with AsyncSession.attach(started["base_url"], started["api_key"]) as session:
            assert await agent(started["base_url"], started["api_key"]) == "Done."
            await session.reward(1.0, source="tests")
            await session.end()
        await behind.close()
        return w.events()


def _check(proxy: Proxy, events: list[dict[str, Any]]) -> None:
    returned = [proxy.returned(number) for number in range(tool_model.TURNS)]
    assert proxy.swapped_within, "the weights must change in the middle of that reply"
    assert set(returned[SWAP_IN][2]) == {1}
    calls = [event["data"] for event in events if event["kind"] == "model_call"]
    assert len({call["lineage"] for call in calls}) == 1
    assert [call["opened"] for call in calls] == ["it is the first call", None, None, None, None]

    with World(
        0, TOPICS, [lambda: Refine(Governance(), [], slots=2), lambda: Seal(["policy"])], chances=CALM
    ) as streams:
        for event in events:
            record = {name: value for name, value in event.items() if name != "data"}
            streams.send("raw", f"{event['tenant']}/{event['group']}", "Event", record, source="gateway")
        streams.drain()
        assert streams.decoded("dead-letters") == []
        (trajectory,) = streams.decoded("policy.trajectories")
    assert trajectory["excluded"] == []
    (sample,) = samples_of(trajectory, 0)
    assert (sample.reward, trajectory["v_head"], trajectory["v_tail"]) == (1.0, 0, 1)

    # The trace, as the engine saw it: the last prompt and the last reply, and every reply where the mask is set.
    prompts = [request["token_ids"] for request in proxy.requests]
    assert sample.tokens.tolist() == [*prompts[-1], *returned[-1][0]]
    for prompt, (ids, _, _) in zip(prompts, returned, strict=True):
        assert sample.tokens[len(prompt) : len(prompt) + len(ids)].tolist() == ids
        assert sample.mask[len(prompt) : len(prompt) + len(ids)].all()
    assert sample.trainable == sum(len(ids) for ids, _, _ in returned)

    # The tensors of the step.
    packed = pack([sample])
    flat = [np.concatenate([np.asarray(part[column]) for part in returned]) for column in range(3)]
    assert packed.tokens[0].tolist() == sample.tokens.tolist()
    assert packed.labels.tolist() == flat[0].tolist()
    assert packed.behaviour.numpy().tobytes() == flat[1].astype(np.float32).tobytes()
    assert packed.versions.tolist() == flat[2].tolist()
