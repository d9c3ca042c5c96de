"""A gateway without a port: requests go straight into its application, and its engine is a function.

Invariant: whoever closes it and opens it again on the same folder has a gateway rebuilt from its capture log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from starlette.types import ASGIApp

from millrace.infra.engines.upstream import HttpReply, StreamedReply, TextUpstream
from millrace.infra.engines.vllm.engine import VllmEngine
from millrace.producers.capture.log import CaptureLog
from millrace.producers.gateway.app import make_app
from millrace.producers.gateway.fleet import Fleet
from millrace.producers.gateway.gateway import Gateway
from millrace.producers.gateway.options import GatewayOptions
from millrace.producers.gateway.recorder import Recorder
from millrace.producers.gateway.rendering.base import Renderer
from millrace.producers.gateway.sessions import Sessions

ENGINE = "http://engine.test"
Script = Callable[[bytes], "Played"]


@dataclass
class Played:
    """An answer as aiohttp would give it. `parts` are its body as it arrives; `error` breaks it off behind them."""

    status: int = 200
    parts: list[bytes] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    error: Exception | None = None

    @property
    def content(self) -> Played:
        return self

    async def iter_any(self) -> AsyncGenerator[bytes, None]:
        for part in self.parts:
            yield part
        if self.error is not None:
            raise self.error

    async def read(self) -> bytes:
        if self.error is not None:
            raise self.error
        return b"".join(self.parts)

    def release(self) -> None: ...

    def close(self) -> None: ...


class PlayedEngine(VllmEngine):
    """The client of vLLM, whose server is `script`: the request's body in, the answer out."""

    script: Script

    async def _send(self, body: bytes) -> Any:
        return self.script(body)


class PlayedUpstream(TextUpstream):
    """The same for an upstream of text."""

    script: Script

    async def _send(self, method: str, path: str, body: bytes | None, headers: Any = None) -> StreamedReply:
        answer: Any = self.script(body or b"")
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


class Loud(logging.Handler):
    """Keeps what was logged with a traceback: a fault that nobody thought of."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.faults: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.faults.append(logging.Formatter().format(record))


class InProcess:
    """Open on `folder`. With `upstream` it stands before one that gives text."""

    def __init__(
        self, folder: Path, renderer: Renderer, script: Script, *, upstream: bool = False, **options: Any
    ) -> None:
        self.folder = folder
        self.log = CaptureLog(folder / "capture")
        self.sessions = Sessions(self.log.folder, "policy")
        self.rebuilt = self.sessions.rebuild(self.log)
        self.engine = PlayedEngine(ENGINE, patience_s=0)
        self.engine.script = script
        fleet = Fleet("policy", lambda url: self.engine, (ENGINE,))
        settings = GatewayOptions(**{"policy": "policy", "patience_s": 0.0, **options})
        self.gateway = Gateway(settings, self.sessions, Recorder(self.log), fleet, None if upstream else renderer)
        self.upstream = PlayedUpstream(f"{ENGINE}/v1")
        self.upstream.script = script
        self.app: ASGIApp = make_app(self.gateway, self.upstream if upstream else None)

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

        given = {"host": "127.0.0.1:8900", **(headers or {})}
        scope = {
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
        await self.app(scope, receive, send)
        done.set()
        return answer

    async def close(self) -> None:
        """Let go of the folder."""
        for session in list(self.sessions.live.values()):
            for task in list(session.calls.values()):
                task.cancel()
        self.log.close()
