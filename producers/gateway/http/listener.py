"""The port of a gateway: what answers on it, how many connections may be open on it, and how long one may say nothing.

Invariants: a port that is open before its gateway can answer refuses each call with 503 and `Retry-After`, in the shape
of its API; a server that ends by itself ends the process, whatever that does at the time; a connection on which no
request has begun for `SILENT_S` is closed, whether it ever bore one or not, so that whoever opens connections and is
silent takes no place from others for longer; the bound on connections is far above what one tenant may ask at once, and
reaching it is said in the log."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import resource
import socket
from collections.abc import Awaitable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP1Settings
from granian.log import LogLevels
from granian.server.embed import Server
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millrace.dialects import all as dialects
from millrace.dialects.errors import ApiError
from millrace.infra.errors import ServiceError
from millrace.producers.gateway.http import session_path
from millrace.producers.gateway.http.visit import discard
from millrace.schemas import bounds
from millrace.schemas.ids import new_id

logger = logging.getLogger(__name__)

SILENT_S = 30
"""seconds in which the headers of the next request of a connection must have come"""
TRY_AGAIN = 1013
"""code with which a WebSocket is closed whose client may come again"""
BACKLOG = 4096
"""connections that the system holds for a server which is about to take them"""
OTHER_FILES = 1024
"""files that a gateway has open besides its connections"""
LOOK_S = 1.0
WARN_S = 60.0
FILES = "/proc/self/fd"
REQUEST_ID = b"x-request-id"
_ID = re.compile(rb"[!-~]{1,128}")
STARTING = "The gateway is starting: try again"
T = TypeVar("T")


def with_id(scope: Scope, send: Send) -> Send:
    """`send` for a request whose answer gets an id: the client's own, where that is one, or a new one. A request that
    came without has it then too, for logs and for upstreams that may have it. An upstream's own stays."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    sent = dict(headers).get(REQUEST_ID)
    id = sent if sent is not None and _ID.fullmatch(sent) else new_id().encode()
    if sent is None:
        scope["headers"] = [*headers, (REQUEST_ID, id)]

    def answer(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start" and REQUEST_ID not in dict(message["headers"]):
            message["headers"] = [*message["headers"], (REQUEST_ID, id)]
        return send(message)

    return answer


async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
    """Say that the gateway is starting."""
    error = ApiError(503, STARTING, type="server_error", code="starting", retry_after_s=1)
    if scope["type"] == "websocket":
        await receive()  # websocket.connect
        return await send({"type": "websocket.close", "code": TRY_AGAIN})
    await discard(receive)
    try:
        path = session_path.strip_name(scope)["path"]
    except ApiError:
        path = scope["path"]
    await dialects.of_path(path).refusal(error)(scope, receive, send)


class Listener:
    """The servers of one process, until `close`. `connections`: how many each may have at most."""

    def __init__(self, connections: int) -> None:
        self._most = allow_files(connections)
        self._servers: dict[Server, asyncio.Task[None]] = {}
        self._app: ASGIApp | None = None
        self._counter = asyncio.create_task(watch_connections(self._most))

    def lead_to(self, app: ASGIApp, host: str, port: int, *, is_shared: bool = False) -> None:
        """Let `app` answer on the public port, which is opened where it is not open yet: `open_public`."""
        if self._app is None:
            self.open_public(host, port, is_shared=is_shared)
        self._app = app

    def open_public(self, host: str, port: int, *, is_shared: bool = False) -> None:
        """Open the public port, on which calls are refused until an application answers there. `is_shared`: with other
        processes of the same gateway. Raises ServiceError where it is in use by others."""
        if not is_shared:
            check_free(host, port)
        self._app = refuse

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            assert self._app is not None
            await self._app(scope, receive, with_id(scope, send) if scope["type"] == "http" else send)

        self._open(make_server(app, self._most, host, port))

    def open_socket(self, app: ASGIApp, path: Path) -> None:
        """Serve `app` on a Unix socket."""
        self._open(make_server(app, self._most, uds=path))

    def _open(self, server: Server) -> None:
        self._servers[server] = asyncio.create_task(server.serve())

    async def end(self) -> None:
        """Wait until a server ends by itself; raises what ended it."""
        if not self._servers:
            await asyncio.Event().wait()
        tasks, _ = await asyncio.wait(self._servers.values(), return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.result()

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """Do `work` while the servers serve. Raises what ends one of them meanwhile."""
        task, end = asyncio.create_task(work), asyncio.create_task(self.end())
        try:
            await asyncio.wait([task, end], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                end.result()
            return await task
        finally:
            task.cancel()
            end.cancel()

    async def close(self) -> None:
        """Close the ports: connections end once they have been answered. Raises what ended a server before."""
        self._counter.cancel()
        for server, task in self._servers.items():
            if not task.done():
                server.main_loop_interrupt.set()
                server.interrupt_signal = True
        await asyncio.gather(*self._servers.values())


def check_free(host: str, port: int) -> None:
    """Raise ServiceError where somebody listens on a port: the server would share it, and take calls from the other."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            message = (
                f"the gateway cannot listen on {host}:{port} ({error.strerror}): stop what does, or set [gateway] port"
            )
            raise ServiceError(message) from None


def make_server(app: ASGIApp, connections: int, host: str = "", port: int = 0, uds: Path | None = None) -> Server:
    """A server of `app`, not started, on a port or on a Unix socket, with at most so many connections at once."""
    if uds is not None:
        uds.unlink(missing_ok=True)  # of a killed one: whoever owns the capture log owns it
    return Server(
        app,
        host,
        port,
        uds,
        interface=Interfaces.ASGINL,
        # A server that also speaks HTTP/2 waits for the first byte of a connection without a limit of time.
        http=HTTPModes.http1,
        websockets=uds is None,
        log_level=LogLevels.warning,
        backlog=BACKLOG,
        backpressure=connections,
        http1_settings=HTTP1Settings(header_read_timeout=SILENT_S * 1000, max_buffer_size=bounds.HEADER_BYTES),
    )


def allow_files(connections: int) -> int:
    """Let this process open as many files as so many connections need; gives how many connections the system lets it
    hold."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = connections + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= files:
        return connections
    most = files if hard == resource.RLIM_INFINITY else min(files, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < files:
        logger.warning(
            "this process may open %d files, which is too few for %d connections: raise the system's limit (ulimit -n),"
            " or lower [gateway] max_connections",
            most,
            connections,
        )
        return max(1, most - min(OTHER_FILES, most // 2))
    return connections


async def watch_connections(connections: int) -> None:
    """Warn while nearly as many connections are open as may be. Runs until it is cancelled."""
    loop = asyncio.get_running_loop()
    quiet_until = 0.0
    while True:
        await asyncio.sleep(LOOK_S)
        count = len(os.listdir(FILES))
        if count >= connections and loop.time() >= quiet_until:
            quiet_until = loop.time() + WARN_S
            logger.warning(
                "about %d connections are open, and at most %d may be ([gateway] max_connections): new ones wait until "
                "another is closed, silent ones are closed after %d s",
                count,
                connections,
                SILENT_S,
            )
