"""vLLM and SGLang side by side, which joined by the log alone, freeze and die under 64 clients of one real gateway,
while versions change: every reply comes whole, once and rightly labelled, and is so in the log. Without
`MILLRACE_ENGINES=all` (`make engines`) 16 clients and two of the four faults stand for them."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch

from millrace.dialects.rendering.tokenizer import ChatTokenizer
from millrace.infra.log.kafka.bus import KafkaBus
from millrace.infra.log.topics import TopicSizes
from millrace.infra.process.net import LOCALHOST, free_ports
from millrace.schemas import codec
from tests.producers.gateway.calls.whole_replies import Reply, ask, check_replies
from tests.support.announced import POLICY, announce, weight_event
from tests.support.engines import EVERY_POINT, KERNELS, until
from tests.support.joined import environment_of, spawn
from tests.support.recorded import recorded_calls
from tests.support.tiny_model import write_model

pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.vllm, pytest.mark.sglang, pytest.mark.timeout(1500)]
NAMESPACE = "real-fleet"
CLIENTS = 64 if EVERY_POINT else 16
LENGTH = 900
KINDS = ("vllm", "sglang")
SERVER, MODEL, WHOLE = slice(0, 1), slice(1, None), slice(None)
"""of an engine's processes, its server, those with its model, or all"""
FAULTS = [
    ("vllm", signal.SIGSTOP, MODEL),
    ("sglang", signal.SIGSTOP, WHOLE),
    ("vllm", signal.SIGKILL, SERVER),
    ("sglang", signal.SIGKILL, MODEL),
][slice(None) if EVERY_POINT else slice(1, 3)]
"""which engine it meets, what, and which of its processes; the one that dies last need not come back"""
SIZES = {"ENGINE__MAX_MODEL_LEN": "1000", "ENGINE__MAX_NUM_SEQS": str(CLIENTS), "ENGINE__KV_CACHE_MB": "256"}
START_S = 600


@dataclass
class RealFleet:
    """Two engines, each with its reloader, and a gateway that was told of neither. `urls`: by kind of engine; `joins`:
    their processes; `folders`: version n is in folders[n % 2]."""

    bus: KafkaBus
    http: httpx.AsyncClient
    folders: list[Path]
    urls: dict[str, str]
    joins: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def folder_of(self, version: int) -> Path:
        """The weights of a version."""
        return self.folders[version % len(self.folders)]

    def announce(self, version: int) -> None:
        """As a learner does that wrote it."""
        announce(self.bus, weight_event(version, self.folder_of(version)), f"{NAMESPACE}.{POLICY}.weights")

    async def standing(self) -> dict[str, Any]:
        """What the gateway says of its engines, by kind."""
        try:
            engines = (await self.http.get("/health", headers={"authorization": "Bearer x"})).json().get("engines", {})
        except httpx.TransportError:
            return {}
        return {kind: engines.get(url, {}) for kind, url in self.urls.items()}

    async def serve(self, version: int) -> None:
        """Wait until all engines do."""

        async def do_serve() -> bool:
            for process in self.joins.values():
                assert process.poll() is None
            return {one.get("version") for one in (await self.standing()).values()} == {version}

        await until(do_serve, START_S)

    async def is_in_the_middle(self, kind: str, replies: list[Reply]) -> bool:
        """Whether a fault of an engine would meet these replies: most streams have begun, and it has its share."""
        engines = await self.standing()
        assert not any(reply.end for reply in replies), f"make replies longer: {engines}"
        begun = [reply for reply in replies if reply.streams and len(reply.text) > LENGTH / 10]
        return len(begun) >= len(replies) * 3 / 8 and bool(engines[kind]["running"] >= len(replies) / 8)

    def engine(self, kind: str) -> list[psutil.Process]:
        """The processes of an engine, its server first."""
        (server,) = psutil.Process(self.joins[kind].pid).children()
        return [server, *server.children(recursive=True)]

    def calls(self) -> dict[str, dict[str, Any]]:
        """All model calls of the log, by their response: each is there once."""
        topic = f"{NAMESPACE}.raw"
        records = [one for part in range(self.bus.partitions(topic)) for one in self.bus.read(topic, part)]
        calls = recorded_calls(codec.decode_as("Event", one.value or b"") for one in records)
        assert len({call["response_id"] for call in calls}) == len(calls)
        return {call["response_id"]: call for call in calls}


@asynccontextmanager
async def real_fleet(broker: str, folder: Path) -> AsyncIterator[RealFleet]:
    """All of them at version 0. vLLM is slowed: where both share few cores it would be done before the other begins."""
    from tests.support import unhurried

    args = {"vllm": {"ENGINE__ARGS": json.dumps(unhurried.ARGS)}}
    torch.set_num_threads(1)
    ports = free_ports(4)
    nobody, gateway, *urls = (f"http://{LOCALHOST}:{port}" for port in ports)
    folders = [write_model(folder / f"seed{seed}", seed) for seed in range(2)]
    common = {"ENGINE__KEY": "key-of-the-fleet"}
    with KafkaBus(broker) as bus:
        bus.ensure_topics(TopicSizes(NAMESPACE, POLICY).specs())
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=gateway, timeout=30, limits=limits) as http:
            fleet = RealFleet(bus, http, folders, dict(zip(KINDS, urls, strict=True)))
            fleet.announce(0)
            more = {**common, "GATEWAY__PORT": str(ports[1])}
            environment = environment_of(broker, NAMESPACE, folder / "gateway", nobody, **more)
            processes = [spawn(("gateway",), environment, folder / "gateway.log")]
            try:
                for kind, url in fleet.urls.items():
                    more = {**common, **SIZES, "ENGINE__KIND": kind, **args.get(kind, {})}
                    environment = environment_of(broker, NAMESPACE, folder / kind, url, **more)
                    environment["PYTHONPATH"] = str(KERNELS)
                    fleet.joins[kind] = spawn(("engine", "join"), environment, folder / f"{kind}.log")
                    processes.append(fleet.joins[kind])
                await fleet.serve(0)
                yield fleet
            finally:
                for process in processes:
                    process.terminate()
                for process in processes:
                    process.wait(60)


@pytest.mark.parametrize("_", [pytest.param(0, id="sglang")])  # by its name it runs beside no other SGLang
async def test_engines_of_two_kinds_freeze_and_die_under_clients(broker: str, tmp_path: Path, _: int) -> None:
    async with real_fleet(broker, tmp_path) as fleet:
        tokenizer = ChatTokenizer(fleet.folders[0])
        for version, (kind, fault, part) in enumerate(FAULTS):
            first, processes = version * CLIENTS, fleet.engine(kind)
            replies = [Reply(streams=number % 2 == 0) for number in range(CLIENTS)]
            clients = [
                asyncio.create_task(ask(fleet.http, number, LENGTH, reply))
                for number, reply in enumerate(replies, first)  # what was asked before would go where it went
            ]
            await until(partial(fleet.is_in_the_middle, kind, replies))
            for process in processes[part]:
                process.send_signal(fault)
            fleet.announce(version + 1)
            await asyncio.gather(*clients)
            if fault == signal.SIGSTOP:
                for process in processes[part]:
                    process.resume()

            await until(lambda first=first: len(fleet.calls()) >= first + CLIENTS)
            calls = fleet.calls()
            assert len(calls) == first + CLIENTS
            unlabelled = check_replies(replies, calls, tokenizer, LENGTH, fleet.folder_of, before=version)
            moves = [calls[reply.id] for reply, count in zip(replies, unlabelled, strict=True) if count]
            assert moves, "some streams were in the middle"
            for call in moves:
                (share,) = call["earlier_engines"]
                assert (share["engine"], share["engine_version"]) == (kind, fleet.urls[kind])
                assert call["engine"] != kind
            print(kind, fault.name, f"{len(moves)} streams moved behind up to {max(unlabelled)} tokens")
            if version < len(FAULTS) - 1:
                await fleet.serve(version + 1)
            if fault == signal.SIGKILL:
                await until(lambda processes=processes: not any(process.is_running() for process in processes))
