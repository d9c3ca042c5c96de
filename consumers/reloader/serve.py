"""The process `millrace reload`: one reloader beside one engine."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from millrace.consumers.reloader.broadcast import FromLearner
from millrace.consumers.reloader.shell import Reloader, Restart
from millrace.consumers.reloader.transport import SharedDirectory, WeightTransport
from millrace.infra.config import Settings
from millrace.infra.connect import connect
from millrace.infra.engines.kinds import KINDS
from millrace.infra.local_keys import engine_key
from millrace.infra.process.ending import stop_event

PATIENCE_S = 10.0
"""how long an engine that is asked to end may take"""


def run(settings: Settings, *, url: str | None = None) -> None:
    """Keep the engine at `url` (default: [engine] url) on the newest version, until SIGTERM or SIGINT."""
    asyncio.run(_run(settings, url or settings.engine.url))


def worker_name(url: str) -> str:
    """The stable name of the engine at `url`."""
    return f"engine-{urlsplit(url).netloc}"


def transport_of(settings: Settings, url: str) -> WeightTransport:
    """How versions reach the engine at `url`."""
    directory = SharedDirectory(cache_of(settings, url))
    return FromLearner(directory) if settings.engine.weights == "broadcast" else directory


def cache_of(settings: Settings, url: str) -> Path | None:
    """Where versions of the engine at `url` are composed: a place of its own; None when engine and reloader are known
    to share no disk but that of the weights."""
    if not settings.engine.cache and not settings.engine.local:
        return None
    root = Path(settings.engine.cache or settings.home / "engines")
    return root.absolute() / worker_name(url).replace(":", "-")


async def _run(settings: Settings, url: str) -> None:
    stop = stop_event()
    is_here = settings.engine.local
    async with reloader_of(
        settings, url, is_here=is_here, restart=partial(end_engine, url) if is_here else None
    ) as one:
        await one.run(stop)


@asynccontextmanager
async def reloader_of(
    settings: Settings,
    url: str,
    *,
    is_here: bool,
    restart: Restart | None,
    on_drain: Callable[[], None] | None = None,
) -> AsyncIterator[Reloader]:
    """The reloader of the engine at `url`, with a connection to both. `is_here`: the engine runs on this machine."""
    engine = settings.engine
    control = KINDS[engine.kind].control(url, partial(engine_key, settings), engine.device if is_here else None)
    with connect(settings) as bus:
        try:
            yield Reloader(
                bus,
                control,
                namespace=settings.namespace,
                policy=settings.policy.name,
                worker=worker_name(url),
                restart=restart,
                transport=transport_of(settings, url),
                keep=settings.policy.eta + 2,
                interrupt=engine.interrupt,
                root=settings.weights,
                kind=engine.kind,
                on_drain=on_drain,
            )
        finally:
            await control.close()


def end_engine(url: str) -> int | None:
    """End the process that listens at `url`, which can no longer be trusted; whoever supervises it starts it again.
    Gives its pid, None when nothing on this machine that belongs to us listens there. Blocks for up to 10 s."""
    process = _listener(url)
    if process is None:
        return None
    process.terminate()
    try:
        process.wait(PATIENCE_S)
    except psutil.TimeoutExpired:
        process.kill()
        process.wait(PATIENCE_S)
    return process.pid


def _listener(url: str) -> psutil.Process | None:
    parts = urlsplit(url)
    if not _is_here(parts.hostname or ""):
        return None
    for process in psutil.process_iter():
        try:
            sockets = process.net_connections("tcp")
        except (psutil.AccessDenied, psutil.NoSuchProcess):
            continue
        if any(one.status == psutil.CONN_LISTEN and one.laddr.port == parts.port for one in sockets):
            return process
    return None


def _is_here(host: str) -> bool:
    """Whether a host is this machine."""
    try:
        address = ipaddress.ip_address(socket.gethostbyname(host))
    except (OSError, ValueError):
        return False
    local = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    return address.is_loopback or str(address) in local
