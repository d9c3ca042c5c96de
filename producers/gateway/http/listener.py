"""The port of a gateway: how many connections may be open on it, and how long one may say nothing.

Invariants: a connection on which no request has begun for `SILENT_S` is closed, whether it ever bore one or not, so
that whoever opens connections and is silent takes no place from others for longer; the bound on connections is far
above what one tenant may ask at once, and reaching it is said in the log."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
from pathlib import Path

from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP1Settings
from granian.log import LogLevels
from granian.server.embed import Server
from starlette.types import ASGIApp

from millrace.schemas import bounds

logger = logging.getLogger(__name__)

SILENT_S = 30
"""seconds in which the headers of the next request of a connection must have come"""
BACKLOG = 4096
"""connections that the system holds for a server which is about to take them"""
OTHER_FILES = 1024
"""files that a gateway has open besides its connections"""
LOOK_S = 1.0
WARN_S = 60.0
FILES = "/proc/self/fd"


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
    wanted = connections + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < wanted:
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
