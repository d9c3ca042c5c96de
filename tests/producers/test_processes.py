"""The gateway and the rollout worker as processes, on a real broker, killed and started again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from millrace.dialects.rendering.tokenizer import ChatTokenizer
from millrace.infra.log.base import Outgoing
from millrace.infra.log.kafka.bus import KafkaBus
from millrace.infra.log.topics import TopicSizes
from millrace.infra.process.net import free_ports
from millrace.schemas import codec
from millrace.schemas.ids import now_micros
from tests.support import chat_tokenizer
from tests.support.gateway_world import status
from tests.support.instant_engine import InstantEngine, serving

pytestmark = [pytest.mark.slow, pytest.mark.kafka]

USER = {"role": "user", "content": "312"}


class Deployment:
    """One gateway and its surroundings."""

    def __init__(
        self,
        bus: KafkaBus,
        bootstrap: str,
        folder: Path,
        engine: InstantEngine,
        tokenizer: Path,
        namespace: str = "producers",
    ) -> None:
        self.bus = bus
        self.namespace = namespace
        self.engine = engine
        (self.port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        tasks = folder / "tasks.jsonl"
        tasks.write_text(
            "".join(json.dumps({"id": f"t{n}", "messages": [USER], "answer": "x"}) + "\n" for n in range(9))
        )
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.getcwd(),
            "MILLRACE_NAMESPACE": namespace,
            "MILLRACE_HOME": str(folder),
            "MILLRACE_KAFKA__BOOTSTRAP": bootstrap,
            "MILLRACE_GATEWAY__PORT": str(self.port),
            "MILLRACE_ENGINE__URL": engine.url,
            "MILLRACE_ROLLOUT__AGENT": "millrace.apps.demo.sort_agent:agent",
            "MILLRACE_ROLLOUT__TASKS": str(tasks),
            "MILLRACE_ROLLOUT__AHEAD": "4",
        }
        bus.ensure_topics(TopicSizes(namespace, "policy").specs())
        version = {
            "policy": "policy", "version": 0, "parent": None, "mode": "full", "uri": str(tokenizer), "digest": "",
            "files": {}, "tokenizer_hash": "tok", "template_hash": "tem", "seq_lo": 0, "seq_hi": 0, "batch": 1,
            "eta": 1, "shards": 1, "group_size": 1, "time": now_micros(),
        }  # fmt: skip
        self.put("policy.weights", "WeightVersion", version)
        self.acknowledge()

    def put(self, topic: str, name: str, record: dict[str, Any], partition: int = 0) -> None:
        with self.bus.publisher() as publisher:
            value = codec.encode(name, record)
            publisher.publish(Outgoing(f"{self.namespace}.{topic}", b"k", value, partition=partition)).result(60)

    def acknowledge(self) -> None:
        acknowledged = {**status(0, url=self.engine.url), "expires_at": now_micros() + 600_000_000}
        self.put("workers", "WorkerStatus", acknowledged)

    def raw(self) -> list[dict[str, Any]]:
        """Events of raw, repeats dropped as their numbers say."""
        out = []
        for partition in range(2):
            mark: dict[bytes, int] = {}
            for record in self.bus.read(f"{self.namespace}.raw", partition):
                source, seq = record.headers["source"], int(record.headers["source-seq"])
                if seq > mark.get(source, -1):
                    mark[source] = seq
                    out.append(codec.decode_as("Event", record.value or b""))
        return out

    def beats(self) -> int:
        """How often rollout workers have said that they live."""
        told = (
            codec.decode_as("WorkerStatus", r.value) for r in self.bus.read(f"{self.namespace}.workers", 0) if r.value
        )
        return sum(status["role"] == "rollout" for status in told)

    @contextmanager
    def process(self, entry: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
        code = f"from millrace.infra.config import load; from {entry} import run; run(load());"
        code += "from millrace.infra.process.ending import end; end()"
        process = subprocess.Popen([sys.executable, "-c", code], env={**self.environment, **environment})
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    async def answers(self, http: httpx.AsyncClient) -> None:
        for _ in range(6000):
            try:
                if (await http.get(f"{self.url}/health")).status_code == 200:
                    return
            except httpx.TransportError:
                await asyncio.sleep(0.02)
        raise AssertionError("the gateway did not come up")


@asynccontextmanager
async def deployment(broker: str, folder: Path) -> AsyncIterator[Deployment]:
    tokenizer = chat_tokenizer.write(folder / "tokenizer")
    encode = ChatTokenizer(tokenizer).encode
    async with serving(InstantEngine(lambda prompt: encode("123<|im_end|>"))) as engine:
        with KafkaBus(broker) as bus:
            yield Deployment(bus, broker, folder, engine, tokenizer)


async def until(condition: Any, timeout_s: float = 120.0) -> None:
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not await asyncio.to_thread(condition):
        assert asyncio.get_running_loop().time() < deadline, "it did not happen in time"
        await asyncio.sleep(0.1)


async def test_killed_gateways_and_workers_lose_and_double_nothing(broker: str, tmp_path: Path):
    async with deployment(broker, tmp_path) as d, httpx.AsyncClient(timeout=60) as http:
        chat = f"{d.url}/v1/chat/completions"
        with d.process("millrace.producers.gateway.serve") as gateway:
            await d.answers(http)
            workers = {"authorization": f"Bearer {(tmp_path / 'keys' / 'workers').read_text()}"}
            wanted = {"ticket": 100, "group_size": 1}
            assert (await http.post(f"{d.url}/v1/sessions", json=wanted)).status_code == 403
            session = (await http.post(f"{d.url}/v1/sessions", json=wanted, headers=workers)).json()
            headers = {"authorization": f"Bearer {session['api_key']}"}
            body: dict[str, Any] = {"model": "m", "messages": [USER]}
            answer = await http.post(chat, json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            reply = answer.json()["choices"][0]["message"]
            gateway.kill()
        with d.process("millrace.producers.gateway.serve") as gateway:
            await d.answers(http)
            d.acknowledge()
            body["messages"] = [USER, reply, USER]
            assert (await http.post(chat, json=body, headers=headers)).status_code == 200
            for ticket in range(4):
                grant = {
                    "ticket": ticket, "policy": "policy", "prompt_id": "p", "task": json.dumps({"messages": [USER]}),
                    "group_size": 2, "samples": [0, 1], "round": 0, "min_version": 0, "deadline": 9, "lease_until": 0,
                    "reward_deadline_ms": 1000, "awaits": [], "time": 0,
                }  # fmt: skip
                d.put("policy.grants", "Grant", grant, ticket % 2)
            with d.process("millrace.producers.rollout.serve", MILLRACE_ROLE="rollout-0") as worker:
                await until(lambda: sum(e["kind"] == "episode_ended" for e in d.raw()) >= 2)
                worker.kill()
            beats = d.beats()
            with d.process("millrace.producers.rollout.serve", MILLRACE_ROLE="rollout-0") as worker:
                await until(lambda: d.beats() > beats)  # from then on it ends well when asked to
                await until(lambda: len(ended(d)) == 8)
                await until(lambda: d.bus.ends(f"{d.namespace}.policy.prompts")[0] > 4)
                worker.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(worker.wait, 120) == 0
            await http.post(f"{d.url}/v1/sessions/{session['session']}/end", json={}, headers=headers)
            gateway.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(gateway.wait, 120) == 0
        own = [e for e in d.raw() if e["group"] == "100"]
        assert [e["kind"] for e in own] == ["episode_started", "model_call", "model_call", "episode_ended"]
        assert [e["step"] for e in own] == [0, 1, 2, 3]
        one, two = (codec.decode_body("model_call", e["body"]) for e in own[1:3])
        assert (two["lineage"], two["opened"], one["tokenizer_hash"]) == (one["lineage"], None, "tok")
        assert one["trainable"]
        assert two["trainable"]
        prompts = [codec.decode_as("Prompt", r.value or b"") for r in d.bus.read(f"{d.namespace}.policy.prompts", 0)]
        assert [p["number"] for p in prompts] == list(range(4))


def ended(d: Deployment) -> set[tuple[str, int]]:
    """(group, sample) of episodes that ended as granted."""
    started = {
        e["trajectory"]: codec.decode_body("episode_started", e["body"])["sample"]
        for e in d.raw()
        if e["kind"] == "episode_started"
    }
    return {
        (e["group"], started[e["trajectory"]])
        for e in d.raw()
        if e["kind"] == "episode_ended" and e["group"] != "100" and e["trajectory"] in started
    }
