"""The process `millrace rollout`: one worker, and the task loader where it is its turn."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import uvloop

from millrace.infra.config import Settings, is_local
from millrace.infra.connect import connect
from millrace.infra.errors import ConfigError
from millrace.infra.heartbeat import Heartbeat, unless_in
from millrace.infra.local_keys import WORKERS, make_keys, workers_key
from millrace.infra.log.base import Bus
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.process.ending import stop_event
from millrace.producers.rollout.agents import load_agent
from millrace.producers.rollout.episodes import Runner
from millrace.producers.rollout.trouble import Trouble
from millrace.producers.rollout.worker import Names, RolloutWorker
from millrace.producers.tasks.loader import Loader, LoaderThread
from millrace.producers.tasks.source import open_tasks


def run(settings: Settings) -> None:
    """Work until SIGTERM or SIGINT."""
    if not settings.rollout.agent:
        raise ConfigError("[rollout] agent is not set: name your agent as module:function")
    if not settings.rollout.key:
        _check_near(settings)
        make_keys(settings, WORKERS)
    with connect(settings) as bus:
        uvloop.run(_run(settings, bus))


def _check_near(settings: Settings) -> None:
    """Raises ConfigError where the gateway may be on another machine, and cannot know a key that is made here."""
    host = settings.gateway.host
    if not is_local(host) and not workers_key(settings):
        raise ConfigError(
            f"[rollout] key names none of [gateway.keys], the gateway is at {host}, and this machine has no key of its "
            "workers (home/keys/workers): give the workers a key of [gateway.keys], and name it as [rollout] key"
        )


def worker_name() -> str:
    """The stable name of this worker: what the supervisor calls the process, else host and pid."""
    return os.environ.get("MILLRACE_ROLE") or f"rollout-{socket.gethostname()}-{os.getpid()}"


async def _run(settings: Settings, bus: Bus) -> None:
    stop = stop_event()
    rollout, gateway = settings.rollout, settings.gateway
    trouble = Trouble()
    runner = Runner(
        load_agent(rollout.agent, trouble),
        f"http://{gateway.host}:{gateway.port}/v1",
        workers_key(settings),
        concurrency=rollout.concurrency,
        timeout_s=rollout.timeout_s,
        sampling=rollout.sampling,
        trouble=trouble,
    )
    names = Names(settings.namespace, settings.policy.name, worker_name())
    worker = RolloutWorker(bus, names, runner, make_loader(settings, bus), ClaimStore(settings.claims))
    beat = Heartbeat(
        bus,
        names.namespace,
        worker=names.worker,
        role="rollout",
        policy=names.policy,
        standing=unless_in(lambda: trouble.message),
    )
    beat.start()
    try:
        await worker.run(stop)
    finally:
        await asyncio.to_thread(beat.close)
        await runner.close()


def make_loader(settings: Settings, bus: Bus) -> LoaderThread | None:
    """The task loader that the settings ask for; None without tasks. Raises ConfigError when they cannot be read."""
    if not settings.rollout.tasks:
        return None
    source = open_tasks(Path(settings.rollout.tasks))
    rollout = settings.rollout
    return LoaderThread(
        lambda: Loader(
            bus,
            settings.namespace,
            settings.policy.name,
            source,
            ahead=rollout.ahead,
            epochs=rollout.epochs,
            claims=ClaimStore(settings.claims),
        )
    )
