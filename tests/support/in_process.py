"""A gateway without a port: requests go straight into its application, and its engines are functions.

Invariant: whoever closes it and opens it again on the same folder has a gateway rebuilt from its capture log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from starlette.types import ASGIApp

from millrace.dialects.all import DIALECTS
from millrace.dialects.rendering.base import Renderer
from millrace.infra.engines.base import Engine
from millrace.infra.engines.upstream import HttpReply, StreamedReply, TextUpstream
from millrace.infra.engines.vllm.engine import VllmEngine
from millrace.producers.capture.log import CaptureLog
from millrace.producers.gateway.app import make_app
from millrace.producers.gateway.calls.fleet import Fleet
from millrace.producers.gateway.calls.gateway import Gateway
from millrace.producers.gateway.calls.served_policy import ServedPolicy
from millrace.producers.gateway.options import GatewayOptions
from millrace.producers.gateway.sessions.recorder import Recorder
from millrace.producers.gateway.sessions.sessions import Sessions
from millrace.producers.gateway.sessions.streaming_marks import StreamingMarks
from millrace.producers.gateway.spending import Spending
from millrace.producers.gateway.upstreams import embeddings
from millrace.producers.gateway.upstreams.routes import RouteRule
from millrace.producers.gateway.upstreams.upstreams import ONE, Upstream, Upstreams
from tests.support.gateway_world import status

ENGINE = "http://engine.test"
POLICY = "policy"
APIS = frozenset({*(dialect.name for dialect in DIALECTS), embeddings.NAME})
"""what an upstream can speak"""
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")
"""events behind which a socket takes the next frame"""
NEVER = 2**62
"""when what these engines say of themselves expires, in micros"""
NONE: Mapping[str, Any] = {}
Script = Callable[[bytes], "Played"]
Answers = Callable[[str, bytes], "Played"]
"""an upstream's: the path below its base url and the body in, the answer out"""


@dataclass
class Played:
    """An answer as the clients of engines (`take`) and of upstreams (`content`) get it. `parts` are its body as it
    arrives; `error` breaks it off behind them."""

    status: int = 200
    parts: list[bytes] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    error: Exception | None = None
    _parts: Iterator[bytes] | None = field(default=None, init=False)

    @property
    def content(self) -> Played:
        return self

    async def iter_any(self) -> AsyncGenerator[bytes, None]:
        for part in self.parts:
            yield part
        if self.error is not None:
            raise self.error

    async def take(self) -> bytes:
        self._parts = iter(self.parts) if self._parts is None else self._parts
        if part := next(filter(None, self._parts), b""):
            return part
        if self.error is not None:
            raise self.error
        return b""

    async def read(self) -> bytes:
        if self.error is not None:
            raise self.error
        return b"".join(self.parts)

    def close(self) -> None: ...


class PlayedEngine(VllmEngine):
    """The client of vLLM, whose server is `script`: the request's body in, the answer out."""

    script: Script

    async def _send(self, body: bytes) -> Any:
        return replace(self.script(body))  # a script may give the same one again and again


class PlayedUpstream(TextUpstream):
    """The same for an upstream of text."""

    script: Answers

    async def _send(self, method: str, path: str, body: bytes | None, headers: Any = None) -> StreamedReply:
        answer: Any = self.script(path, body or b"")
        return HttpReply(answer, self.base_url, self._idle_s, self._longest)


@dataclass
class Answer:
    """What came back; status 0 when nothing did."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)


@dataclass
class Frames:
    """What came over a socket: its events, and the code with which it was closed, 0 where its client left."""

    events: list[dict[str, Any]] = field(default_factory=list)
    code: int = 0
    begun: bool = False


class Loud(logging.Handler):
    """Keeps what was logged with a traceback: a fault that nobody thought of."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.faults: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.faults.append(logging.Formatter().format(record))


class Far(NamedTuple):
    """An upstream beside the engines, which speaks everything: which models it answers, and how."""

    rules: Sequence[RouteRule]
    answers: Answers


class InProcess:
    """Open on `folder`. With `upstream` it stands before one that gives text, in chat completions, in place of engines;
    `far` stands beside them. `others`: engines of other policies, by their names. `versions`: what an engine of each
    policy acknowledged."""

    def __init__(
        self,
        folder: Path,
        renderer: Renderer,
        script: Script,
        *,
        upstream: bool = False,
        far: Far | None = None,
        others: Mapping[str, Script] = NONE,
        versions: Mapping[str, int] = NONE,
        **options: Any,
    ) -> None:
        self.folder = folder
        self.log = CaptureLog(folder / "capture")
        self.sessions = Sessions(self.log.folder, POLICY)
        settings = GatewayOptions(**{"policy": POLICY, "patience_s": 0.0, **options})
        spending, underway = Spending(settings.limits), StreamingMarks(self.log.folder)
        self.rebuilt = self.sessions.rebuild(self.log, spending, underway)
        self._versions = versions
        served = [
            ServedPolicy(name, renderer, _fleet(name, answers), settings.max_model_len)
            for name, answers in others.items()
        ]
        own = None if upstream else renderer
        recorder = Recorder(self.log, spending=spending, underway=underway)
        recorder.label_cut(self.sessions.live)
        self.gateway = Gateway(settings, self.sessions, recorder, _fleet(POLICY, script), own, served)
        self.acknowledge()
        self.upstream = PlayedUpstream(f"{ENGINE}/v1")
        self.upstream.script = (lambda _, body: script(body)) if far is None else far.answers
        self.app: ASGIApp = make_app(self.gateway, self.upstream if upstream else self._beside(far))

    def _beside(self, far: Far | None) -> Upstreams | None:
        if far is None:
            return None
        return Upstreams([Upstream(ONE, self.upstream, APIS)], far.rules, first_s=0.0)

    def acknowledge(self) -> None:
        """The engines say once more which versions they serve, as after an answer for which they were doubted."""
        for policy, version in self._versions.items():
            said = {**status(version, url=f"{ENGINE}/{policy}"), "policy": policy, "expires_at": NEVER}
            self.gateway.engines.observe(said)

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes | Iterable[bytes] = b"",
        headers: dict[str, str] | None = None,
        *,
        leave: bool = False,
    ) -> Answer:
        """One request. `leave`: the client goes as soon as its body is sent, or a part of it."""
        parts = [body] if isinstance(body, bytes) else list(body)
        messages: list[dict[str, Any]] = [
            {"type": "http.request", "body": part, "more_body": leave or at < len(parts) - 1}
            for at, part in enumerate(parts)
        ]
        done, answer = asyncio.Event(), Answer()

        async def receive() -> Any:
            if messages:
                return messages.pop(0)
            if not leave:
                await done.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                answer.status = message["status"]
                answer.headers = {name.decode("latin-1"): text.decode("latin-1") for name, text in message["headers"]}
            else:
                answer.body += message.get("body", b"")

        await self.app(_scope(method, path, headers or {}), receive, send)
        done.set()
        return answer

    async def frames(self, path: str, sent: Sequence[bytes], headers: Mapping[str, str] = NONE) -> Frames:
        """One WebSocket: every frame is sent when the one before is answered. An odd one is text where it can be."""
        got = Frames()
        waiting, answered = list(sent), asyncio.Event()
        answered.set()

        async def receive() -> Any:
            if not got.begun:
                got.begun = True
                return {"type": "websocket.connect"}
            await answered.wait()
            answered.clear()
            if not waiting:
                return {"type": "websocket.disconnect", "code": 1000}
            return {"type": "websocket.receive", "bytes": waiting.pop(0)}

        async def send(message: Any) -> None:
            if message["type"] == "websocket.send":
                got.events.append(orjson.loads(message["text"]))
                if got.events[-1].get("type") in ENDS:
                    answered.set()
            elif message["type"] == "websocket.close":
                got.code = message["code"]
                waiting.clear()
                answered.set()

        await self.app({**_scope("GET", path, headers), "type": "websocket", "scheme": "ws"}, receive, send)
        return got

    async def close(self) -> None:
        """Let go of the folder."""
        for session in list(self.sessions.live.values()):
            for task in list(session.calls.values()):
                task.cancel()
        self.log.close()


def _fleet(policy: str, script: Script) -> Fleet:
    """The one engine of a policy."""

    def make(url: str) -> Engine:
        engine = PlayedEngine(url, patience_s=0)
        engine.script = script
        return engine

    return Fleet(policy, make, (f"{ENGINE}/{policy}",))


def _scope(method: str, path: str, headers: Mapping[str, str]) -> dict[str, Any]:
    given = {"host": "127.0.0.1:8900", **headers}
    return {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "scheme": "http",
        "root_path": "",
        "http_version": "1.1",
        "server": ("127.0.0.1", 8900),
        "client": ("127.0.0.1", 1),
        "headers": [(name.lower().encode(), text.encode("latin-1", "replace")) for name, text in given.items()],
    }
