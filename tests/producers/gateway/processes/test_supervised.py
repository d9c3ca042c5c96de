"""Two supervised gateway processes under real clients of three APIs, each killed once on the way, and then one: what a
client was told is in one log once, and a conversation stays with its session."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from millrace.consumers import version_zero
from millrace.infra.config import load, variables
from millrace.infra.connect import connect
from millrace.infra.engines.base import ABORT
from millrace.infra.gateway_processes import folder_of
from millrace.infra.machine.broker import Broker
from millrace.infra.machine.leftovers import deployment_id
from millrace.infra.machine.programs import programs
from millrace.infra.machine.supervisor import Supervisor
from millrace.infra.process.net import LOCALHOST, free_ports
from millrace.producers.capture.log import CaptureLog
from millrace.producers.gateway.marks import index_of
from millrace.producers.gateway.processes.hop import Hops
from millrace.producers.gateway.sessions.ownership import TRAJECTORY_HEADER
from millrace.schemas import codec
from tests.support.engines import LightEngine
from tests.support.tiny_model import write_model

pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.timeout(900)]
CLIENTS, TURNS, TOKENS = 64, 4, 8
PATIENCE_S = 240.0
GONE = (openai.APIError, anthropic.APIError, httpx2.HTTPError, EOFError)


class Talk:
    """One conversation. `told`: the responses that its client saw end, with the sessions that they said."""

    def __init__(self, number: int, url: str) -> None:
        self.number = number
        self.told: list[tuple[str, str]] = []
        self.name = f"talk-{number}" if number % 2 else None
        headers = {"x-session-id": self.name} if self.name else {}
        common: dict[str, Any] = {"api_key": "x", "max_retries": 20, "timeout": PATIENCE_S, "default_headers": headers}
        self.openai = openai.AsyncOpenAI(base_url=f"{url}/v1", **common)
        self.anthropic = anthropic.AsyncAnthropic(base_url=url, **common)
        self.said: list[Any] = []
        turns: list[Callable[[], Awaitable[None]]] = [self.chat, self.messages, self.responses]
        self.turn = turns[number // 2 % 3]

    async def chat(self) -> None:
        stream = await self.openai.chat.completions.with_raw_response.create(
            model="policy", messages=self.said, max_tokens=TOKENS, stream=True
        )
        id, text, finish = "", "", None
        async for chunk in stream.parse():
            id = chunk.id
            text += chunk.choices[0].delta.content or "" if chunk.choices else ""
            finish = chunk.choices[0].finish_reason if chunk.choices else finish
        self.ended(finish, id, stream.headers, {"role": "assistant", "content": text})

    async def messages(self) -> None:
        async with self.anthropic.messages.stream(model="policy", messages=self.said, max_tokens=TOKENS) as stream:
            async for _ in stream:
                pass
            reply = await stream.get_final_message()
        self.ended(
            reply.stop_reason, reply.id, stream.response.headers, {"role": "assistant", "content": reply.content}
        )

    async def responses(self) -> None:
        before = self.told[-1][0] if self.told else openai.omit
        answer = await self.openai.responses.with_raw_response.create(
            model="policy", input=self.said[-1:], max_output_tokens=TOKENS, previous_response_id=before
        )
        reply = answer.parse()
        self.ended(reply.status, reply.id, answer.headers, {"role": "assistant", "content": ""})

    def ended(self, how: str | None, id: str, headers: Any, reply: Any) -> None:
        """The reply came to its end, so far as its client can tell."""
        if how is None:
            raise EOFError
        self.told.append((id, headers[TRAJECTORY_HEADER]))
        self.said.append(reply)

    async def run(self, turns: int, ends: asyncio.Queue[None]) -> None:
        """So many turns more; one that was cut is taken again, as agents do."""
        for turn in range(len(self.told), len(self.told) + turns):
            self.said.append({"role": "user", "content": f"{self.number}: {turn}"})
            while len(self.told) <= turn:
                try:
                    await self.turn()
                except GONE:
                    await asyncio.sleep(0.1)
            ends.put_nowait(None)

    async def close(self) -> None:
        """Both clients."""
        await self.openai.close()
        await self.anthropic.close()


def calls(folder: Path) -> list[dict[str, Any]]:
    """The model calls of a log, each with its trajectory."""
    log = CaptureLog(folder)
    try:
        events = [codec.decode_as("Event", kept.entry.value) for kept in log.read()]
    finally:
        log.close()
    return [
        {**codec.decode_body(event["kind"], event["body"]), "trajectory": event["trajectory"]}
        for event in events
        if event["kind"] == "model_call"
    ]


async def test_a_killed_process_comes_back_with_its_sessions_while_the_other_serves(tmp_path: Path) -> None:
    with Broker(tmp_path / "broker", sync=True) as broker:
        await asyncio.to_thread(broker.start)
        model = write_model(tmp_path / "model")
        engine = LightEngine(model, tmp_path / "engine.log")
        (port,) = free_ports(1)
        flags: dict[str, Any] = {
            "home": str(tmp_path / "home"),
            "namespace": "several",
            "kafka.bootstrap": broker.bootstrap,
            "kafka.local": False,
            "gateway.port": port,
            "gateway.processes": 2,
            "gateway.engine_url": engine.url,
        }
        made = load(flags=flags)
        hops = Hops(made.home, made.gateway.capture_dir)
        supervisor = Supervisor(made.home, deployment_id(made.namespace, made.home))
        try:
            with connect(made) as bus:
                bus.ensure_topics(made.layout.specs())
                version_zero.create(made, model, bus)
            await asyncio.to_thread(engine.start)
            asked = [one for one in programs(made, variables(flags)) if one.name.startswith("gateway")]
            assert [one.name for one in asked] == ["gateway", "gateway-1"]
            await asyncio.to_thread(supervisor.up, asked)
            async with asyncio.timeout(PATIENCE_S):
                while not all(hops.socket_of(index).exists() for index in range(2)):
                    await asyncio.sleep(0.05)
            talks = [Talk(number, f"http://{LOCALHOST}:{port}") for number in range(CLIENTS)]
            ends = asyncio.Queue[None]()
            running = [asyncio.create_task(talk.run(TURNS, ends)) for talk in talks]
            async with asyncio.timeout(PATIENCE_S):
                for name in ("gateway-1", "gateway"):
                    for _ in range(CLIENTS):
                        await ends.get()
                    pid = supervisor.pid(name)
                    assert pid is not None
                    os.kill(pid, signal.SIGKILL)
                await asyncio.gather(*running)
            assert all(supervisor.pid(name) not in (None, pid) for name in ("gateway", "gateway-1"))
            # One process from now on: the other goes on with what it holds, and begins nothing.
            flags["gateway.processes"] = 1
            asked = [one for one in programs(load(flags=flags), variables(flags)) if one.name.startswith("gateway")]
            assert [(one.name, one.revives) for one in asked] == [("gateway", True), ("gateway-1", False)]
            await asyncio.to_thread(supervisor.up, asked)
            late = Talk(2 * CLIENTS, f"http://{LOCALHOST}:{port}")
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.gather(*(talk.run(1, ends) for talk in [*talks, late]))
            assert index_of(late.told[0][1]) == 0
            for talk in [*talks, late]:
                await talk.close()
        finally:
            await asyncio.to_thread(supervisor.down)
            engine.kill()
    logs = [calls(folder_of(made.gateway.capture_dir, index)) for index in range(2)]
    assert all(logs), "each has its share"
    recorded = {call["response_id"]: call for log in logs for call in log}
    assert Counter(call["response_id"] for log in logs for call in log).most_common(1)[0][1] == 1
    for talk in talks:
        assert len({session for _, session in talk.told}) == 1, (talk.number, talk.told)
        for id, session in talk.told:
            assert (recorded[id]["trajectory"], recorded[id]["finish_reason"] != ABORT) == (session, True)
    held = [{call["trajectory"] for call in log} for log in logs]
    assert not held[0] & held[1], "a session is in one log"
    named = [talk for talk in talks if talk.name]
    assert len({talk.told[0][1] for talk in named}) == len(named)
