"""A whole gateway on a free port inside the test's event loop, before a scripted engine and an in-memory bus."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import httpx

from millrace.dialects.rendering.base import Renderer
from millrace.infra.engines.base import Chunk, Engine, LabelSpan, Sampling, Usage
from millrace.infra.errors import EngineError
from millrace.infra.gateway_processes import folder_of
from millrace.infra.log.base import TopicSpec
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.memory.bus import MemoryBus
from millrace.infra.principals.watch import PrincipalWatch
from millrace.infra.process.net import free_ports
from millrace.producers.capture.forwarder import Forwarder
from millrace.producers.capture.log import CaptureLog
from millrace.producers.gateway.calls.fleet import Fleet
from millrace.producers.gateway.calls.gateway import Gateway
from millrace.producers.gateway.calls.served_policy import AwaitedPolicy, ServedPolicy
from millrace.producers.gateway.http.callers import spending_of
from millrace.producers.gateway.options import GatewayOptions
from millrace.producers.gateway.processes.crossing import Crossing
from millrace.producers.gateway.processes.hop import Hops
from millrace.producers.gateway.processes.owner import ProcessLayout
from millrace.producers.gateway.serve import serve
from millrace.producers.gateway.sessions.recorder import Recorder
from millrace.producers.gateway.sessions.sessions import Sessions
from millrace.producers.gateway.sessions.streaming_marks import StreamingMarks
from millrace.producers.gateway.spending import Spending
from millrace.schemas import codec
from millrace.schemas.ids import now_micros
from tests.support.recorded import Recorded

POLICY = "policy"
RAW = "t.raw"
ENGINE = "http://engine.test"
WORKERS = "sk-of-the-workers"
"""key of rollout workers, unless a test chooses one"""


@dataclass
class Asked:
    """One request that the engine got, and what it gave back."""

    prompt: list[int]
    sampling: Sampling
    ids: list[list[int]] = field(default_factory=list)


Script = Callable[[list[int], Sampling, int], Sequence[int]]


class Closes(Protocol):
    async def close(self) -> None: ...


Client = TypeVar("Client", bound=Closes)


class ScriptedEngine(Engine):
    """Answers with what `script(prompt, sampling, choice)` gives; log-probability of token t at position i is
    -(t % 7) - i / 1000. `gate` holds each token back until it is released; `label` may change in between."""

    kind = "scripted"

    def __init__(self, script: Script, label: str = f"{POLICY}@0") -> None:
        self.script = script
        self.label = label
        self.asked: list[Asked] = []
        self.gate: asyncio.Semaphore | None = None
        self.error: EngineError | None = None
        self.break_after: int | None = None
        self.finish: str | None = None
        self.left_early = 0

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str, stream: bool = True
    ) -> AsyncGenerator[Chunk, None]:
        asked = Asked(list(prompt_ids), sampling)
        self.asked.append(asked)
        if self.error is not None and self.break_after is None:
            raise self.error
        done = False
        try:
            for choice in range(sampling.n):
                ids = list(self.script(asked.prompt, sampling, choice))
                finish = self.finish or ("stop" if len(ids) <= sampling.max_tokens else "length")
                ids = ids[: sampling.max_tokens]
                asked.ids.append(ids)
                labels = []
                for at, id in enumerate(ids):
                    if self.gate is not None:
                        await self.gate.acquire()
                    if self.error is not None and at == self.break_after:
                        raise self.error
                    labels.append(self.label)
                    if stream and at < len(ids) - 1:
                        yield Chunk(choice, [id], [logprob(id, at)])
                last = ids[-1:] if stream else ids
                start = len(ids) - len(last)
                usage = Usage(len(asked.prompt), sum(map(len, asked.ids)), 0) if choice == sampling.n - 1 else None
                yield Chunk(
                    choice,
                    last,
                    [logprob(id, start + at) for at, id in enumerate(last)],
                    finish,
                    None,
                    spans(labels),
                    usage,
                )
            done = True
        finally:
            self.left_early += not done

    async def health(self) -> bool:
        return True

    async def weight_version(self) -> str:
        return self.label

    async def close(self) -> None:
        pass


def logprob(id: int, at: int) -> float:
    return -float(id % 7) - at / 1000


def spans(labels: Sequence[str]) -> tuple[LabelSpan, ...]:
    out: list[LabelSpan] = []
    for at, label in enumerate(labels):
        if out and out[-1].label == label:
            out[-1] = LabelSpan(label, out[-1].start, at + 1)
        else:
            out.append(LabelSpan(label, at, at + 1))
    return tuple(out)


@dataclass
class World:
    """What a test needs to look at."""

    gateway: Gateway
    log: CaptureLog
    bus: MemoryBus
    engine: Any
    url: str
    http: httpx.AsyncClient
    forwarder: Forwarder
    _kept: AsyncExitStack

    def kept(self, client: Client) -> Client:
        """A client of this gateway, which is closed before the gateway is."""
        self._kept.push_async_callback(client.close)
        return client

    def acknowledge(
        self,
        version: int,
        *,
        state: str = "serving",
        incarnation: str = "one",
        url: str = ENGINE,
        policy: str = POLICY,
    ) -> None:
        """As if the engine's reloader had said so."""
        self.gateway.engines.observe({**status(version, state, incarnation, url), "policy": policy})

    def events(self, trajectory: str | None = None) -> list[dict[str, Any]]:
        """Events of the capture log with decoded bodies under `data`, model calls with whole requests, in order."""
        recorded, out = Recorded(), []
        for kept in self.log.read():
            event = codec.decode_as("Event", kept.entry.value)
            if trajectory in (None, event["trajectory"]):
                out.append({**event, "data": recorded.body(event)})
        return out

    def calls(self, trajectory: str | None = None) -> list[dict[str, Any]]:
        return [event["data"] for event in self.events(trajectory) if event["kind"] == "model_call"]

    async def start(self, **fields: Any) -> dict[str, str]:
        """Start a session with the key of rollout workers; returns session, api_key and base_url."""
        key = self.gateway.options.rollout_key
        answer = await self.http.post("/v1/sessions", json=fields, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def chat(self, messages: Any, key: str = "x", **fields: Any) -> httpx.Response:
        body = {"model": "m", "messages": messages, **fields}
        return await self.http.post(
            "/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}, timeout=30
        )


def status(version: int | None, state: str = "serving", incarnation: str = "one", url: str = ENGINE) -> dict[str, Any]:
    now = now_micros()
    return {
        "worker": "engine-0",
        "incarnation": incarnation,
        "role": "engine",
        "state": state,
        "policy": POLICY,
        "version": version,
        "label": None,
        "url": url,
        "host": "here",
        "pid": 1,
        "error": None,
        "expires_at": now + 60_000_000,
        "time": now,
    }


@asynccontextmanager
async def world(
    folder: Path,
    renderer: Renderer | None,
    engine: Any,
    *,
    log_options: dict[str, Any] | None = None,
    upstream: Any = None,
    port: int | None = None,
    required: bool = False,
    others: Sequence[ServedPolicy] = (),
    awaited: Sequence[AwaitedPolicy] = (),
    layout: ProcessLayout | None = None,
    principals: PrincipalWatch | None = None,
    **options: Any,
) -> AsyncIterator[World]:
    """Serve a gateway; its folder may be used again by another world afterwards. `engine`: one, or several by url. An
    upstream ends with it; `layout`: it is one of several processes, which share the folder."""
    bus = MemoryBus()
    bus.ensure_topics([TopicSpec(RAW, 2)])
    shared, index = folder / "capture", layout.here if layout is not None else 0
    shared.mkdir(parents=True, exist_ok=True)
    log = CaptureLog(folder_of(shared, index), **(log_options or {}))
    sessions = Sessions(shared, POLICY, index=index)
    made = GatewayOptions(**{"policy": POLICY, "rollout_key": WORKERS, **options})
    spending = (
        Spending(made.limits) if principals is None else spending_of(made, principals, asyncio.get_running_loop())
    )
    underway = StreamingMarks(log.folder)
    sessions.rebuild(log, spending, underway)
    engines = engine if isinstance(engine, Mapping) else {ENGINE: engine}
    fleet = Fleet(POLICY, engines.__getitem__, tuple(engines))
    recorder = Recorder(log, is_required=required, spending=spending, underway=underway)
    recorder.label_cut(sessions.live)
    gateway = Gateway(made, sessions, recorder, fleet, renderer, others, awaited, principals)
    forwarder = Forwarder(log, bus, RAW, ClaimStore(str(folder / "claims")))
    forwarder.start()
    stop, port = asyncio.Event(), port or free_ports(1)[0]
    crossing = None if layout is None else Crossing(gateway, layout, Hops(folder, shared), shared)
    serving = asyncio.create_task(serve(gateway, "127.0.0.1", port, stop, upstream, None, crossing))
    url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=url, timeout=30) as http, AsyncExitStack() as kept:
        if crossing is None or not crossing.is_retired:
            await _answers(http)
        while crossing is not None and not (_is_listening(crossing.socket) or serving.done()):
            await asyncio.sleep(0.01)
        try:
            yield World(gateway, log, bus, engine, url, http, forwarder, kept)
        finally:
            stop.set()
            await serving
            await asyncio.to_thread(forwarder.close)
            log.close()
            if upstream is not None:
                await upstream.close()


def _is_listening(path: Path) -> bool:
    """Whether somebody takes connections at a socket. Its file alone says no more than that somebody will: a server
    makes it, and listens once its thread has started, until when whoever calls is refused and told that it is down."""
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


async def _answers(http: httpx.AsyncClient) -> None:
    for _ in range(6000):
        try:
            if (await http.get("/health")).status_code == 200:
                return
        except httpx.TransportError:
            await asyncio.sleep(0.01)
    raise AssertionError("the gateway did not come up")
