"""Gateway, broker, engine and upstream as processes, killed and stopped under streaming clients of all dialects: every
call that a client saw end is in the topic once, with the words that it was told, and every one that was cut is
labelled, by a record or by a gap, once.

The witness is the client: it alone says what ended. Each call is of a session of its own, whose id comes with its first
byte. Half of them ask the policy, whose engine samples exact tokens, half an upstream. `MILLRACE_GATEWAY_KILLS` makes
the series longer."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

import httpx
import pytest

from millrace.consumers import version_zero
from millrace.dialects.all import read
from millrace.infra.config import Settings, load, variables
from millrace.infra.connect import connect
from millrace.infra.engines.base import ABORT
from millrace.infra.errors import BusError
from millrace.infra.gateway_processes import INDEX, folder_of
from millrace.infra.log.base import Bus
from millrace.infra.log.topics import full_name
from millrace.infra.machine.broker import Broker
from millrace.infra.process.net import LOCALHOST, free_ports, is_listening
from millrace.infra.workers import ENGINE, status
from millrace.producers.capture.log import CaptureLog
from millrace.producers.gateway.sessions.ownership import TRAJECTORY_HEADER
from millrace.producers.gateway.sessions.recorder import CUT_OFF
from millrace.schemas import codec
from millrace.schemas.arrays import unpack
from tests.support.engines import LightEngine, control_of
from tests.support.tiny_model import write_model

pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.timeout(900)]
ROUNDS = int(os.environ.get("MILLRACE_GATEWAY_KILLS", "1"))
"""how often each part is killed, and how often it is stopped for a while"""
CLIENTS = 64 if ROUNDS > 1 else 32
PATIENCE_S = 240.0
PIECES, PAUSE_S = 6, 0.15
PARTS = ("gateway", "upstream", "broker", "engine")
TOKENS = 24
NOTHING: Mapping[str, str] = MappingProxyType({})
ROOT = Path(__file__).parents[3]
USER = {"role": "user", "content": "hi"}
ASKED: list[tuple[str, dict[str, Any], str]] = [
    ("chat/completions", {"model": "policy", "messages": [USER], "max_tokens": TOKENS}, "[DONE]"),
    ("chat/completions", {"model": "far", "messages": [USER]}, "[DONE]"),
    ("messages", {"model": "policy", "messages": [USER], "max_tokens": TOKENS}, "event: message_stop"),
    ("chat/completions", {"model": "far", "messages": [USER]}, "[DONE]"),
    ("responses", {"model": "policy", "input": [USER], "max_output_tokens": TOKENS}, "event: response.completed"),
    ("responses", {"model": "policy", "input": [USER], "max_output_tokens": TOKENS}, "event: response.incomplete"),
]
"""route, request and the end of a stream, of the clients in turn; the last two are one kind, which ends in two ways"""


@dataclass
class Seen:
    """What the clients saw, by the trajectory of their calls."""

    ended: dict[str, str] = field(default_factory=dict)
    """what they were told"""
    cut: set[str] = field(default_factory=set)
    """begun, and not ended"""
    under_way: set[int] = field(default_factory=set)
    """clients that have heard a part of a reply, and not its end"""


class Parts:
    """The processes, each started again at the same place."""

    def __init__(
        self, folder: Path, broker: Broker, processes: int = 1, environment: Mapping[str, str] = NOTHING
    ) -> None:
        self.broker = broker
        gateway, upstream = free_ports(2)
        self.model = write_model(folder / "model")
        self.engine = LightEngine(self.model, folder / "engine.log")
        self.url = f"http://{LOCALHOST}:{gateway}"
        self.ports = {"gateway": gateway, "upstream": upstream}
        flags = {
            "home": str(folder / "home"),
            "namespace": "killed",
            "kafka.bootstrap": broker.bootstrap,
            "kafka.local": "false",
            "gateway.port": str(gateway),
            "gateway.processes": str(processes),
            "gateway.engine_url": self.engine.url,
            "gateway.upstreams": {"far": {"url": f"http://{LOCALHOST}:{upstream}/v1"}},
            "gateway.routes": [{"model": "far", "upstream": "far"}],
        }
        self.settings: Settings = load(flags=flags)
        self._folder = folder
        self._environment = {**os.environ, **variables(flags), "PYTHONPATH": str(ROOT), **environment}
        self._commands = {
            "gateway": [sys.executable, "-P", "-m", "millrace.apps.cli.main", "gateway"],
            "upstream": [
                sys.executable,
                "-m",
                "tests.producers.gateway.slow_upstream",
                str(upstream),
                str(PIECES),
                str(PAUSE_S),
            ],
        }
        for index in range(1, processes):
            self._commands[f"gateway-{index}"] = self._commands["gateway"]
            self.ports[f"gateway-{index}"] = gateway
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, part: str) -> None:
        """Returns once it listens."""
        if part in ("broker", "engine"):
            (self.broker if part == "broker" else self.engine).start()
            return
        with (self._folder / f"{part}.log").open("ab") as output:
            self.processes[part] = subprocess.Popen(
                self._commands[part],
                env={**self._environment, INDEX: part.partition("-")[2] or "0"},
                stdout=output,
                stderr=output,
                cwd=ROOT,
            )

    async def up(self, part: str) -> None:
        """Start it and wait until it listens."""
        await asyncio.to_thread(self.start, part)
        async with asyncio.timeout(PATIENCE_S):
            while part in self.ports and not await asyncio.to_thread(is_listening, LOCALHOST, self.ports[part]):
                assert self.processes[part].poll() is None, (self._folder / f"{part}.log").read_text()
                await asyncio.sleep(0.05)

    async def opened(self, part: str) -> None:
        """Wait until a gateway's log says that it reads its sessions: of several, one port says nothing of each."""
        async with asyncio.timeout(PATIENCE_S):
            while part in self.ports and part != "upstream" and not self._says(part, "live sessions"):
                await asyncio.sleep(0.05)

    def _says(self, part: str, words: str) -> bool:
        return words in (self._folder / f"{part}.log").read_text()

    def signal(self, part: str, what: signal.Signals) -> None:
        """To the process, and wait for its end if it is a kill."""
        if part == "broker":
            if what == signal.SIGKILL:
                self.broker.kill()
            else:
                assert self.broker.pid is not None
                os.kill(self.broker.pid, what)
            return
        process = self.engine.process if part == "engine" else self.processes[part]
        process.send_signal(what)
        if what == signal.SIGKILL:
            process.wait()

    def close(self) -> None:
        """Kill what still runs."""
        self.engine.kill()
        for process in self.processes.values():
            process.kill()
            process.wait()


def told(text: str) -> str:
    """The words of a stream of any dialect, as far as it goes."""
    words = []
    for line in text.split("\n"):  # a reply may hold any other sign that ends a line
        if line.startswith("data: {"):
            with suppress(ValueError):  # a line that was cut
                event = json.loads(line[6:])
                deltas = [choice["delta"].get("content") for choice in event.get("choices", [])]
                if event.get("type") in ("content_block_delta", "response.output_text.delta"):
                    delta = event["delta"]
                    deltas.append(delta if isinstance(delta, str) else delta.get("text"))
                words += [delta for delta in deltas if delta]
    return "".join(words)


async def client(number: int, url: str, seen: Seen, over: asyncio.Event, ends: asyncio.Queue[None]) -> None:
    """Streams one reply after another, each in a session of its own."""
    route, body, _ = ASKED[number % len(ASKED)]
    marks = {mark for other, _, mark in ASKED if other == route}
    async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
        while not over.is_set():
            trajectory = None
            try:
                headers = {"x-millrace-session": os.urandom(8).hex()}
                asked = http.stream("POST", f"{url}/v1/{route}", json={**body, "stream": True}, headers=headers)
                async with asked as answer:
                    if answer.status_code != 200:
                        await answer.aread()
                        await asyncio.sleep(0.2)
                        continue
                    text = ""
                    async for part in answer.aiter_text():
                        text += part
                        trajectory = answer.headers[TRAJECTORY_HEADER]
                        seen.under_way.add(number)
                if any(mark in text for mark in marks):
                    seen.ended[answer.headers[TRAJECTORY_HEADER]] = told(text)
                    ends.put_nowait(None)
                elif trajectory:
                    seen.cut.add(trajectory)
            except httpx.HTTPError:
                if trajectory:
                    seen.cut.add(trajectory)
                await asyncio.sleep(0.2)
            finally:
                seen.under_way.discard(number)


@asynccontextmanager
async def crowd(url: str, seen: Seen) -> AsyncIterator[asyncio.Queue[None]]:
    """All clients at once; the queue gets something for each call that ended."""
    over, ends = asyncio.Event(), asyncio.Queue[None]()
    clients = [asyncio.create_task(client(number, url, seen, over, ends)) for number in range(CLIENTS)]
    try:
        yield ends
    finally:
        over.set()
        await asyncio.gather(*clients)


async def several(ends: asyncio.Queue[None], count: int) -> None:
    """Wait until so many more calls have ended."""
    async with asyncio.timeout(PATIENCE_S):
        while not ends.empty():
            ends.get_nowait()
        for _ in range(count):
            await ends.get()


async def under_way(seen: Seen, part: str) -> None:
    """Wait until a kill of a part cuts some replies that come from it: clients that began together end together."""

    def cuts(number: int) -> bool:
        far = ASKED[number % len(ASKED)][1]["model"] == "far"
        return {"upstream": far, "engine": not far}.get(part, True)

    async with asyncio.timeout(PATIENCE_S):
        while sum(map(cuts, seen.under_way)) < CLIENTS // 8:
            await asyncio.sleep(0.01)


def found(settings: Settings) -> dict[str, list[dict[str, Any]]]:
    """The events in the topic, by trajectory, with their bodies as `data`. What was sent again after a kill is there
    twice, the same to the byte, and falls to the high-water mark of its source: it counts once."""
    out: dict[str, list[dict[str, Any]]] = defaultdict(list)
    values: dict[str, bytes] = {}
    raw = full_name(settings.namespace, "raw")
    with connect(settings) as bus:
        for part in range(bus.partitions(raw)):
            for record in bus.read(raw, part):
                value = record.value or b""
                event = codec.decode_as("Event", value)
                if values.setdefault(event["id"], value) is not value:
                    assert values[event["id"]] == value
                    continue
                out[event["trajectory"]].append({**event, "data": codec.decode_body(event["kind"], event["body"])})
    return out


def dispositions(events: list[dict[str, Any]]) -> list[str]:
    """What the log says became of the one call of a session."""
    out = []
    for event in events:
        if event["kind"] == "model_call":
            out.append("aborted" if event["data"]["finish_reason"] == ABORT else "whole")
        elif event["kind"] == "gap":
            out.append("cut off" if event["data"]["reason"] == CUT_OFF else event["data"]["reason"])
    return out


@pytest.mark.parametrize("processes", [1, 2])
async def test_what_a_client_saw_end_is_in_the_topic_once_and_what_was_cut_is_labelled(
    tmp_path: Path, processes: int
) -> None:
    seen, r = Seen(), Random(11)
    gateways = ["gateway", *(f"gateway-{index}" for index in range(1, processes))]
    with Broker(tmp_path / "broker", sync=True) as broker:
        await asyncio.to_thread(broker.start)
        parts = Parts(tmp_path, broker, processes)
        try:
            with connect(parts.settings) as bus:
                bus.ensure_topics(parts.settings.layout.specs())
                version_zero.create(parts.settings, parts.model, bus)
            for part in ("engine", "upstream", *gateways):
                await parts.up(part)
                await parts.opened(part)
            async with crowd(parts.url, seen) as ends:
                await several(ends, CLIENTS)
                faults = [(part, kill) for part in (*gateways, *PARTS[1:]) for kill in (True, False)] * ROUNDS
                for part, kill in faults:
                    await asyncio.sleep(r.random() * PIECES * PAUSE_S)
                    await under_way(seen, part)
                    if kill:
                        parts.signal(part, signal.SIGKILL)
                        await parts.up(part)
                    else:
                        parts.signal(part, signal.SIGSTOP)
                        await asyncio.sleep(1.0)
                        parts.signal(part, signal.SIGCONT)
                    await several(ends, CLIENTS // 2)
            there = await events_after(parts, gateways)
        finally:
            parts.close()
    outcomes = check_events(there, seen)
    assert {"cut off", "aborted"} <= outcomes, "of a gateway that died, of an upstream that died"


async def test_a_gateway_that_dies_while_replies_move_to_another_engine(tmp_path: Path) -> None:
    seen = Seen()
    kill = {"MILLRACE_KILL": "relay.moved:3", "MILLRACE_KILL_ONCE": str(tmp_path / "killed")}
    with Broker(tmp_path / "broker", sync=True) as broker:
        await asyncio.to_thread(broker.start)
        parts = Parts(tmp_path, broker, environment=kill)
        other = LightEngine(parts.model, tmp_path / "other.log")
        try:
            with connect(parts.settings) as bus:
                bus.ensure_topics(parts.settings.layout.specs())
                version_zero.create(parts.settings, parts.model, bus)
                for part in ("engine", "upstream"):
                    await parts.up(part)
                await asyncio.to_thread(other.start)
                for engine in (parts.engine, other):
                    control = control_of(engine)
                    await control.set_version(f"{parts.settings.policy.name}@0")
                    await control.close()
                    announce_engine(bus, parts.settings, engine.url)
            await parts.up("gateway")
            async with crowd(parts.url, seen) as ends:
                await several(ends, CLIENTS)
                await under_way(seen, "engine")
                parts.signal("engine", signal.SIGKILL)
                assert await asyncio.to_thread(parts.processes["gateway"].wait, PATIENCE_S) == -signal.SIGKILL
                await parts.up("gateway")
                await several(ends, CLIENTS)
            there = await events_after(parts, ["gateway"])
        finally:
            other.kill()
            parts.close()
    assert "cut off" in check_events(there, seen)
    calls = [event["data"] for events in there.values() for event in events if event["kind"] == "model_call"]
    addresses = {call["engine_version"] for call in calls if call["tokenizer_hash"]}
    assert addresses == {parts.engine.url, other.url}
    for call in calls:
        if call["tokenizer_hash"]:
            lost = sum(share["tokens"] for share in call["earlier_engines"])
            versions = unpack(call["output_versions"]).tolist()
            assert versions == [-1] * lost + [0] * (len(versions) - lost) or call["finish_reason"] == ABORT


def announce_engine(bus: Bus, settings: Settings, url: str) -> None:
    """Say that an engine serves version 0, for as long as a test may take."""
    workers = full_name(settings.namespace, "workers")
    outgoing = status(
        workers,
        worker=url,
        incarnation="1",
        role=ENGINE,
        state="serving",
        policy=settings.policy.name,
        lives_s=3600,
        version=0,
        url=url,
        kind="inprocess",
    )
    with bus.publisher() as publisher:
        publisher.publish(outgoing).result(30)


async def events_after(parts: Parts, gateways: list[str]) -> dict[str, list[dict[str, Any]]]:
    """What is in the topic once all gateways have ended well."""
    for index, part in enumerate(gateways):
        parts.signal(part, signal.SIGTERM)
        assert await asyncio.to_thread(parts.processes[part].wait, PATIENCE_S) == 0
        log = CaptureLog(folder_of(parts.settings.gateway.capture_dir, index))
        assert log.end > 0, "each has its share"
        waits = log.waiting
        log.close()
        assert waits == 0, "a start and an orderly end send all"
    async with asyncio.timeout(PATIENCE_S):
        there: dict[str, list[dict[str, Any]]] = {}
        while not there:
            with suppress(BusError):
                there = await asyncio.to_thread(found, parts.settings)
    return there


def check_events(there: dict[str, list[dict[str, Any]]], seen: Seen) -> set[str]:
    """Each call has one disposition, and one that ended for its client is whole. Gives those of calls that did not."""
    for trajectory, events in there.items():
        assert len(dispositions(events)) == 1, trajectory
    ended = {trajectory: dispositions(there[trajectory]) for trajectory in seen.ended}
    assert set(map(tuple, ended.values())) == {("whole",)}
    for trajectory, words in seen.ended.items():
        (call,) = [event["data"] for event in there[trajectory] if event["kind"] == "model_call"]
        assert read(call["request"], call["response"]).replies[0]["content"] == words
        if call["tokenizer_hash"]:  # of ours
            assert 0 < len(unpack(call["output_ids"])) == len(unpack(call["output_logprobs"])) <= TOKENS
    cut = [dispositions(there[trajectory])[0] for trajectory in seen.cut]
    print(f"{len(ended)} ended, {len(cut)} cut: { ({what: cut.count(what) for what in set(cut)}) }")
    # A client may miss the end of a reply that was recorded: the kill came between the two.
    assert set(cut) <= {"cut off", "aborted", "whole"}
    return set(cut)
