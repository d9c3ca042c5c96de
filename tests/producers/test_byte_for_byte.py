"""What the engine sampled is what the learner's step computes on, id by id, log-probability by log-probability; what a
client sent and received is what the log says, in each dialect.

The witnesses are recording proxies between gateway and engine and between client and gateway, never the gateway's own
records. The agent runs five turns with a tool, drops the model's thoughts, writes the tool arguments anew, and the
weights change in the middle of a streamed reply. What it is compared with are the records of the log, and the tensors
that the learner's trainer gives to its backend. The engine is the light one, vLLM, and SGLang."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import numpy as np
import openai
import pytest
import torch
from aiohttp import web

from millrace.dialects.rendering.template import TemplateRenderer
from millrace.dialects.rendering.tokenizer import ChatTokenizer
from millrace.infra.config import Governance
from millrace.infra.engines.control import EngineControl
from millrace.infra.engines.kinds import KINDS, KindName
from millrace.infra.process.net import free_ports
from millrace.producers.client import AsyncSession
from millrace.schemas.arrays import unpack
from millrace.streams.refine.stage import Refine
from millrace.streams.seal.stage import Seal
from millrace.testing.world import CALM, World
from millrace.trainers.backends.torch.backend import TorchBackend
from millrace.trainers.batches.packing import MicroBatch
from tests.support import gateway_world, tool_model
from tests.support.engines import LightEngine, control_of
from tests.support.feed import feed
from tests.support.learners import Place, entries
from tests.support.wire import Exchange, Witness, says

MODEL = "m"
Agent = Callable[[str, str, Collection[int]], Awaitable[str | None]]


async def chat(url: str, key: str, streamed: Collection[int]) -> str | None:
    """Of chat completions."""
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    messages: list[Any] = [tool_model.USER]
    for turn in range(1, tool_model.TURNS + 1):
        stream = turn in streamed
        answer = await client.chat.completions.create(
            model=MODEL, messages=messages, tools=tool_model.TOOLS, stream=stream
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


async def messages(url: str, key: str, streamed: Collection[int]) -> str | None:
    """Of Anthropic's Messages. It asks to see the thoughts of streamed replies alone."""
    client = anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0)
    function = tool_model.TOOLS[0]["function"]
    tools = [{"name": function["name"], "input_schema": function["parameters"]}]
    said: list[Any] = [tool_model.USER]
    for turn in range(1, tool_model.TURNS + 1):
        given: Any = {"model": MODEL, "messages": said, "tools": tools, "max_tokens": 4096}
        if turn in streamed:
            given["thinking"] = {"type": "enabled", "budget_tokens": 1024}
            async with client.messages.stream(**given) as stream:
                message = await stream.get_final_message()
        else:
            message = await client.messages.create(**given)
        calls = [block for block in message.content if block.type == "tool_use"]
        if not calls:
            return "".join(block.text for block in message.content if block.type == "text")
        echoed = [{"type": "tool_use", "id": one.id, "name": one.name, "input": one.input} for one in calls]
        results = [
            {"type": "tool_result", "tool_use_id": one.id, "content": tool_model.tool_result(turn)} for one in calls
        ]
        said += [{"role": "assistant", "content": echoed}, {"role": "user", "content": results}]
    return None


async def responses(url: str, key: str, streamed: Collection[int]) -> str | None:
    """Of OpenAI's Responses. It sends the items of the conversation, and names none by an id."""
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    tools: list[Any] = [{"type": "function", **tool_model.TOOLS[0]["function"]}]
    items: list[Any] = [tool_model.USER]
    for turn in range(1, tool_model.TURNS + 1):
        given: Any = {"model": MODEL, "input": items, "tools": tools}
        if turn in streamed:
            response: Any = None
            async for event in await client.responses.create(**given, stream=True):
                response = event.response if event.type == "response.completed" else response
        else:
            response = await client.responses.create(**given)
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return str(response.output_text)
        for call in calls:
            echoed = {"call_id": call.call_id, "name": call.name, "arguments": _anew(call.arguments)}
            items.append({"type": "function_call", **echoed})
        items += [
            {"type": "function_call_output", "call_id": call.call_id, "output": tool_model.tool_result(turn)}
            for call in calls
        ]
    return None


AGENTS: dict[str, Agent] = {"chat": chat, "messages": messages, "responses": responses}
"""by the name of the dialect"""


def _anew(arguments: str) -> str:
    return json.dumps(json.loads(arguments), sort_keys=True, separators=(",", ":"))


def _plain(answer: Any) -> tuple[str | None, list[tuple[str, str, str]]]:
    message = answer.choices[0].message
    return message.content, [(c.id, c.function.name, c.function.arguments) for c in message.tool_calls or ()]


async def _streamed(answer: Any) -> tuple[str | None, list[tuple[str, str, str]]]:
    content, calls = "", dict[int, tuple[str, str, str]]()
    async for chunk in answer:
        delta = chunk.choices[0].delta
        content += delta.content or ""
        for piece in delta.tool_calls or ():
            id, name, arguments = calls.get(piece.index, (piece.id, piece.function.name, ""))
            calls[piece.index] = id, name, arguments + (piece.function.arguments or "")
    return content or None, [calls[index] for index in sorted(calls)]


pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

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
"""the reply of the first episode in whose middle the weights change"""
STREAMED = (2, SWAP_IN, tool_model.TURNS)
"""the replies that are streamed where both kinds are looked at"""
CONTEXT = 512
GROUP, SEQ, REWARDS = "group-1", 1, (1.0, 0.0)
"""the group that the episodes are the samples of"""
ATTEMPTS = 12
"""A reply is short: on a busy machine it may be over before the engine hears that it should pause."""
LOOK_S = 0.02
PATIENCE_S = 120.0


Told = tuple[list[int], list[float], list[int]]
"""ids, log-probabilities, versions"""


def _choices_of_vllm(value: Any) -> Told:
    ids: list[int] = []
    logprobs: list[float] = []
    spans: list[dict[str, Any]] = []
    for choice in value.get("choices", ()):
        ids += choice.get("token_ids") or []
        logprobs += [token["logprob"] for token in (choice.get("logprobs") or {}).get("content") or ()]
        spans += choice.get("weight_versions") or ()
    return ids, logprobs, _versions(spans)


def _items_of_sglang(value: Any) -> Told:
    (item,) = value if isinstance(value, list) else [value]
    meta = item["meta_info"]
    scores = [logprob for logprob, _, _ in meta["output_token_logprobs"]]
    return item["output_ids"], scores, _versions(meta.get("weight_versions") or ())


def _versions(spans: Collection[dict[str, Any]]) -> list[int]:
    return [int(s["version"].partition("@")[2]) for s in spans for _ in range(s["start"], s["end"])]


@dataclass(frozen=True)
class WireForm:
    """How an engine is asked and answers: where requests go, what else the gateway asks, a request's prompt, and what
    an answer or an event of a stream says."""

    kind: KindName
    path: str
    other: str
    prompt: Callable[[dict[str, Any]], list[int]]
    told: Callable[[Any], Told]


FORMS = {
    "light": WireForm(
        "inprocess", "/inference/v1/generate", "/weight_info", lambda r: r["token_ids"], _choices_of_vllm
    ),
    "vllm": WireForm("vllm", "/inference/v1/generate", "/weight_info", lambda r: r["token_ids"], _choices_of_vllm),
    "sglang": WireForm("sglang", "/generate", "/millrace", lambda r: r["input_ids"][0], _items_of_sglang),
}


@dataclass
class Proxy:
    """Passes generate requests to an engine and keeps what came back, as it came. In the middle of one reply it gives
    the engine `new` weights."""

    control: EngineControl
    form: WireForm
    new: Path
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    answers: list[bytes] = field(default_factory=list)
    before: int = 0
    """tokens that had come when the weights began to change: the old ones sampled them"""

    def forget(self) -> None:
        """Begin again with the first reply."""
        self.requests.clear()
        self.answers.clear()
        self.before = 0

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.requests.append(json.loads(body))
        number = len(self.answers)
        self.answers.append(b"")
        swapping = None
        if number == SWAP_IN - 1:
            await self.control.pause("keep")
            swapping = asyncio.create_task(self._swap_within(number))
        async with (
            aiohttp.ClientSession() as http,
            http.post(
                f"{self.control.url}{self.form.path}", data=body, headers={"content-type": "application/json"}
            ) as got,
        ):
            answer = web.StreamResponse(status=got.status, headers={"content-type": got.content_type})
            await answer.prepare(request)
            async for part in got.content.iter_any():
                self.answers[number] += part
                await answer.write(part)
            if swapping is not None:
                await swapping
            return answer

    async def pass_on(self, request: web.Request) -> web.Response:
        """What else is asked of the engine."""
        async with aiohttp.ClientSession() as http, http.get(f"{self.control.url}{request.path}") as got:
            return web.Response(status=got.status, body=await got.read(), content_type=got.content_type)

    async def _swap_within(self, number: int) -> None:
        """Lets the paused engine sample a few tokens at a time until some have come, then changes its weights."""
        async with asyncio.timeout(PATIENCE_S):
            while b"data: {" not in self.answers[number]:
                await self.control.resume()
                await self.control.pause("keep")
                await asyncio.sleep(LOOK_S)
        self.before = len(self._told(self.answers[number].rpartition(b"\n\n")[0])[0])
        await swap(self.control, self.new, "policy@1")

    @property
    def swapped_within(self) -> bool:
        """Whether both versions sampled the reply in which the weights were to change."""
        return set(self.returned(SWAP_IN - 1)[2]) == {0, 1}

    def returned(self, number: int) -> Told:
        """What one answer says."""
        return self._told(self.answers[number])

    def _told(self, raw: bytes) -> Told:
        """What an engine's answer says, whole or its first events."""
        parts = [part[6:] for part in raw.split(b"\n\n") if part.startswith(b"data: {")] or [raw]
        ids, logprobs, versions = list[int](), list[float](), list[int]()
        for part in parts:
            of_part = self.form.told(json.loads(part))
            ids, logprobs, versions = ids + of_part[0], logprobs + of_part[1], versions + of_part[2]
        return ids, logprobs, versions


@asynccontextmanager
async def proxied(control: EngineControl, form: WireForm, new: Path) -> AsyncIterator[Proxy]:
    proxy, app = Proxy(control, form, new), web.Application(client_max_size=2**24)
    app.add_routes([web.post(form.path, proxy.generate), web.get(form.other, proxy.pass_on)])
    runner = web.AppRunner(app)
    await runner.setup()
    (port,) = free_ports(1)
    await web.TCPSite(runner, "127.0.0.1", port).start()
    proxy.url = f"http://127.0.0.1:{port}"
    try:
        yield proxy
    finally:
        await runner.cleanup()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The two versions of the tool model."""
    return tool_model.write(tmp_path_factory.mktemp("models"))


@pytest.fixture(
    params=[
        "light",
        pytest.param("vllm", marks=pytest.mark.vllm),
        pytest.param("sglang", marks=pytest.mark.sglang),
    ]
)
def form(request: pytest.FixtureRequest) -> WireForm:
    return FORMS[request.param]


@pytest.fixture
async def control(
    form: WireForm, request: pytest.FixtureRequest, models: tuple[Path, Path], tmp_path: Path
) -> AsyncIterator[EngineControl]:
    """Of a server that takes the weights of both versions. A shared one gets its own back."""
    if form is not FORMS["light"]:
        shared = request.getfixturevalue(form.kind)
        made = KINDS[form.kind].control(shared.url, "")
        yield made
        await swap(made, Path(shared.model), "default")
        await made.close()
        return
    light = LightEngine(models[0], tmp_path / "engine.log")
    await asyncio.to_thread(light.start)
    made = control_of(light)
    yield made
    await made.close()
    light.kill()


async def swap(control: EngineControl, folder: Path, label: str) -> None:
    await control.pause("keep")
    await control.load(folder)
    await control.set_version(label)
    assert await control.reset_prefix_cache()
    await control.resume()


async def test_what_was_sampled_is_what_is_trained(
    control: EngineControl, form: WireForm, models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = models
    for attempt in range(ATTEMPTS):
        await swap(control, old, "policy@0")
        async with proxied(control, form, new) as proxy:
            events = await _group(tmp_path / f"gateway-{attempt}", old, proxy)
        if proxy.swapped_within:
            break
    assert proxy.swapped_within, "the weights must change in the middle of that reply"
    trajectories = _sealed(events)
    _check(_trained(tmp_path / "learner", old, trajectories, monkeypatch), proxy, [t["id"] for t in trajectories])


async def test_what_passed_is_what_is_recorded(
    control: EngineControl, form: WireForm, models: tuple[Path, Path], tmp_path: Path
) -> None:
    old, new = models
    renderer = TemplateRenderer(ChatTokenizer(old))
    async with proxied(control, form, new) as proxy:
        behind = KINDS[proxy.form.kind].client(proxy.url, "")
        async with gateway_world.world(tmp_path / "gateway", renderer, behind, max_model_len=CONTEXT) as w:
            w.acknowledge(0)
            for name, agent in AGENTS.items():
                for _ in range(ATTEMPTS):
                    await swap(control, old, "policy@0")
                    proxy.forget()
                    session, witness = await w.start(), Witness(w.url)
                    async with witness.serving() as url:
                        assert await agent(url, session["api_key"], STREAMED) == "Done."
                    if proxy.swapped_within:
                        break
                assert proxy.swapped_within, f"the weights must change in the middle of that reply of {name}"
                _same(witness.seen, w.calls(session["session"]), proxy)
            await behind.close()


def _same(seen: list[Exchange], calls: list[dict[str, Any]], proxy: Proxy) -> None:
    """The records say what the client's side and the engine's side of the gateway saw, call by call."""
    assert [one.streamed for one in seen] == [turn in STREAMED for turn in range(1, tool_model.TURNS + 1)]
    tokens: list[int] = []
    for number, (one, call) in enumerate(zip(seen, calls, strict=True)):
        assert call["request"] == one.asked
        assert says(call["response"], one), (call["response"], one.said)
        ids, logprobs, versions = proxy.returned(number)
        tokens = [*tokens[: call["prefix_len"]], *unpack(call["prompt_ids"]).tolist()]
        assert tokens == proxy.form.prompt(proxy.requests[number])
        tokens += unpack(call["output_ids"]).tolist()
        assert unpack(call["output_ids"]).tolist() == ids
        assert unpack(call["output_logprobs"]).tobytes() == np.asarray(logprobs, np.float32).tobytes()
        assert unpack(call["output_versions"]).tolist() == versions == sorted(versions)
        if number != SWAP_IN - 1:
            assert set(versions) == {int(number >= SWAP_IN)}
    swapped = unpack(calls[SWAP_IN - 1]["output_versions"]).tolist()
    assert 0 < proxy.before <= swapped.index(1)
    assert len({call["lineage"] for call in calls}) == 1


async def _group(home: Path, model: Path, proxy: Proxy) -> list[dict[str, Any]]:
    """Run the agent for every sample of a group through a gateway that keeps its files in `home`, or once where the
    weights did not change in time; the events of its capture log."""
    renderer = TemplateRenderer(ChatTokenizer(model))
    behind = KINDS[proxy.form.kind].client(proxy.url, "")
    async with gateway_world.world(home, renderer, behind, max_model_len=CONTEXT) as w:
        w.acknowledge(0)
        for sample, reward in enumerate(REWARDS):
            about = {"ticket": SEQ, "group": GROUP, "group_size": len(REWARDS), "sample": sample, "min_version": 0}
            started = await w.start(**about, awaits=["tests"])
            async with AsyncSession.attach(started["base_url"], started["api_key"]) as session:
                assert await AGENTS["chat"](w.url, started["api_key"], [SWAP_IN]) == "Done."
                session.judge_key = ""
                await session.reward(reward, source="tests")
                await session.end()
            if not proxy.swapped_within:
                break
        await behind.close()
        return w.events()


def _sealed(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The trajectories that the stages make of captured events, by sample."""
    with World(
        0, TOPICS, [lambda: Refine(Governance(), [], slots=2), lambda: Seal(["policy"])], chances=CALM
    ) as streams:
        for event in events:
            record = {name: value for name, value in event.items() if name != "data"}
            streams.send("raw", f"{event['tenant']}/{event['group']}", "Event", record, source="gateway")
        streams.drain()
        assert streams.decoded("dead-letters") == []
        found = sorted(streams.decoded("policy.trajectories"), key=lambda one: one["sample"])
    for number, trajectory in enumerate(found):
        calls = [e["data"] for e in events if e["kind"] == "model_call" and e["trajectory"] == trajectory["id"]]
        assert [call["opened"] for call in calls] == ["it is the first call", None, None, None, None]
        assert len({call["lineage"] for call in calls}) == len(trajectory["lineages"]) == 1
        assert trajectory["excluded"] == []
        assert (trajectory["group"], trajectory["reward"]) == (GROUP, REWARDS[number])
    assert [(one["v_head"], one["v_tail"]) for one in found] == [(0, 1), (1, 1)]
    return found


def _trained(
    folder: Path, model: Path, trajectories: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> list[MicroBatch]:
    """What the learner gives to its backend for the step that trains them, from version 1."""
    steps: list[list[MicroBatch]] = []
    step = TorchBackend.step

    def watched(self: TorchBackend, micros: list[MicroBatch], *rest: Any) -> Any:
        steps.append(list(micros))
        return step(self, micros, *rest)

    monkeypatch.setattr(TorchBackend, "step", watched)
    place = Place(folder, model=model, **{"policy.name": "policy", "policy.batch": 1})
    feed(place.bus, place.settings, range(SEQ), version=0)
    feed(
        place.bus,
        place.settings,
        range(SEQ, SEQ + 1),
        version=1,
        change=lambda sample: sample.update(trajectories[sample["sample"]]),
    )
    place.learn(2)
    rows = entries(place.bus, place.settings)
    place.bus.close()
    assert [[(group["seq"], group["lost"]) for group in row["groups"]] for row in rows[1:]] == [
        [(0, None)],
        [(SEQ, None)],
    ]
    assert rows[-1]["unchanged"] is None
    return steps[-1]


def _check(micros: list[MicroBatch], proxy: Proxy, ids: list[str]) -> None:
    """The tensors of the step hold what the proxy saw, of all episodes (trajectory `ids`), and nothing else."""
    (packed,) = micros
    assert sorted(member.trajectory for member in packed.members) == sorted(ids)
    tokens: list[int] = []
    trained: list[int] = []
    replies: list[tuple[list[int], list[float], list[int]]] = []
    for member in packed.members:
        numbers = range(first := tool_model.TURNS * ids.index(member.trajectory), first + tool_model.TURNS)
        returned = [proxy.returned(number) for number in numbers]
        prompts = [proxy.form.prompt(proxy.requests[number]) for number in numbers]
        for prompt, (sampled, _, _) in zip(prompts, returned, strict=True):
            trained += range(len(tokens) + len(prompt), len(tokens) + len(prompt) + len(sampled))
        tokens += [*prompts[-1], *returned[-1][0]]  # the trace, as the engine saw it: the last prompt and reply
        replies += returned
    sampled, logprobs, versions = ([one for reply in replies for one in reply[column]] for column in range(3))
    assert set(versions) == {0, 1}
    assert packed.tokens[0].tolist() == tokens
    assert (packed.at + 1).tolist() == trained
    assert packed.labels.tolist() == sampled
    assert packed.behaviour.dtype == torch.float32
    assert packed.behaviour.numpy().tobytes() == np.asarray(logprobs, np.float32).tobytes()
    assert packed.versions.tolist() == versions
