"""The process `millrace reload`: one reloader beside one engine."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from millrace.consumers.reloader.broadcast import FromLearner
from millrace.consumers.reloader.restart import end_engine
from millrace.consumers.reloader.shell import Reloader
from millrace.consumers.reloader.transport import SharedDirectory, WeightTransport
from millrace.infra.config import Settings
from millrace.infra.connect import connect
from millrace.infra.engines.vllm.control import VllmControl
from millrace.infra.engines.vllm.launch import installed
from millrace.infra.errors import ServiceError
from millrace.infra.local_keys import engine_key
from millrace.infra.process.stopping import stop_asked


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


def on_cpu(settings: Settings) -> bool | None:
    """Whether the engine runs on a CPU; None where only it can know."""
    if not settings.engine.local:
        return None
    try:
        return settings.engine.kind == "vllm" and installed(settings.engine.device) == "cpu"
    except ServiceError:
        return None


def cache_of(settings: Settings, url: str) -> Path | None:
    """Where versions of the engine at `url` are composed: a place of its own; None when engine and reloader are known
    to share no disk but that of the weights."""
    if not settings.engine.cache and not settings.engine.local:
        return None
    chosen = Path(settings.engine.cache or settings.home / "engines")
    return chosen.absolute() / worker_name(url).replace(":", "-")


async def _run(settings: Settings, url: str) -> None:
    stop = stop_asked()
    bus = connect(settings)
    control = VllmControl(url, key=partial(engine_key, settings), on_cpu=on_cpu(settings))
    try:
        reloader = Reloader(
            bus,
            control,
            namespace=settings.namespace,
            policy=settings.policy.name,
            worker=worker_name(url),
            restart=partial(end_engine, url) if settings.engine.local else None,
            transport=transport_of(settings, url),
            keep=settings.policy.eta + 2,
            interrupt=settings.engine.interrupt,
            root=settings.weights,
        )
        await reloader.run(stop)
    finally:
        await control.close()
        bus.close()
