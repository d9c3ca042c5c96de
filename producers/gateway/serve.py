"""The process `millrace gateway`: one event loop with the server, the engines' clients and the capture log.

Order of life: the port is open at once, and calls get 503 while one policy is found, the capture log opened and the
sessions rebuilt; other policies are served as they are found. (Of several processes on one port each opens it last: a
call that comes meanwhile goes to another.) On SIGTERM new calls and `/health` get 503 while calls in flight end, then
the port is closed, then what was captured is sent on, and what could not be sent is sent by the next start."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import sys
import time
from contextlib import suppress
from functools import partial

import msgspec
import uvloop

from millrace.infra.config import Settings
from millrace.infra.connect import connect
from millrace.infra.engines.kinds import engine_opener
from millrace.infra.engines.upstream import TextUpstream
from millrace.infra.gateway_processes import folder_of, note, own_index, with_folder
from millrace.infra.heartbeat import Heartbeat
from millrace.infra.local_keys import WORKERS, engine_key, make_keys
from millrace.infra.log.base import Bus
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.topics import PARTS, full_name
from millrace.infra.process.ending import stop_event
from millrace.producers.capture.forwarder import Forwarder
from millrace.producers.capture.log import CaptureLog
from millrace.producers.gateway.app import make_app
from millrace.producers.gateway.calls.fleet import Fleet
from millrace.producers.gateway.calls.gateway import Gateway
from millrace.producers.gateway.calls.policy_joining import ANY_LENGTH, Joining, first, joining, rest
from millrace.producers.gateway.calls.served_policy import ServedPolicy
from millrace.producers.gateway.calls.workers_watch import WorkersWatch
from millrace.producers.gateway.episodes.idle import end_idle_episodes
from millrace.producers.gateway.http.callers import open_principals, spending_of
from millrace.producers.gateway.http.listener import Listener
from millrace.producers.gateway.options import GatewayOptions
from millrace.producers.gateway.processes.crossing import Crossing
from millrace.producers.gateway.processes.hop import Hops
from millrace.producers.gateway.processes.owner import ProcessLayout
from millrace.producers.gateway.sessions import checkpoint
from millrace.producers.gateway.sessions.recorder import Recorder
from millrace.producers.gateway.sessions.sessions import Sessions
from millrace.producers.gateway.sessions.streaming_marks import StreamingMarks
from millrace.producers.gateway.upstreams.upstreams import Upstreams
from millrace.producers.gateway.upstreams.upstreams import make as make_upstreams
from millrace.schemas.ids import now_micros

logger = logging.getLogger(__name__)

DRAIN_S = 5.0
CHECK_S = 1.0
CHECKPOINT_S = 60.0
"""seconds after which a checkpoint is written, however little happened since the last"""
COLLECTED_AFTER = 20_000
"""objects more than at the last look of the garbage collector before it looks again"""
START_S = 60.0
"""how long a call waits where the only engine does not listen yet"""


def run(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT."""
    # The forwarder's thread holds the lock for microseconds at a time; the loop must not wait the default 5 ms for it.
    sys.setswitchinterval(0.0005)
    if not settings.rollout.key:
        make_keys(settings, WORKERS)
    with connect(settings) as bus:
        uvloop.run(_run(settings, bus))


async def _run(settings: Settings, bus: Bus) -> None:
    layout = ProcessLayout(own_index(), settings.gateway.processes, note(settings, now_micros()))
    stop, listener = stop_event(), Listener(settings.gateway.max_connections)
    if len(layout.holders) == 1:
        listener.open_public(settings.gateway.host, settings.gateway.port)
    try:
        await _prepare_and_serve(settings, bus, layout, stop, listener)
    finally:
        await listener.close()


async def _prepare_and_serve(
    shared_settings: Settings, bus: Bus, layout: ProcessLayout, stop: asyncio.Event, listener: Listener
) -> None:
    shared_dir = shared_settings.gateway.capture_dir
    settings = with_folder(shared_settings, folder_of(shared_dir, layout.here))
    upstreams = make_upstreams(settings, os.environ)
    options = GatewayOptions.of(settings, ANY_LENGTH)
    resubmits, key = settings.engine.interrupt == "abort", partial(engine_key, settings)
    engines = engine_opener(settings.engine.kind, resubmits=resubmits, key=key)
    waiting: list[Joining] = []
    served_policies: list[ServedPolicy] = []
    if upstreams is None or not upstreams.answers_all:
        waiting = joining(settings, engines, START_S)
        served_policies = await listener.during(first(waiting, bus, stop))
        if not served_policies:
            return
    spare_collector()  # else it walks through all sessions again and again while they are rebuilt
    name = os.environ.get("MILLRACE_ROLE") or f"gateway-{settings.gateway.port}"
    # First: else nobody knew whose spending the capture log tells.
    principals = await listener.during(asyncio.to_thread(open_principals, bus, shared_settings, name))
    log, forwarder = await listener.during(asyncio.to_thread(capture, settings, bus))
    secret = settings.gateway.session_secret.get_secret_value()
    # Half of the hours that its first event is kept: a start rebuilds the whole of an episode, or nothing of it.
    named_s = settings.topics.short_hours * 3600 / 2
    # Of one gateway, each process knows the keys of all sessions.
    sessions = Sessions(shared_dir, options.policy, secret, named_s=named_s, index=layout.here)
    spending = spending_of(options, principals, asyncio.get_running_loop())
    underway = StreamingMarks(log.folder)
    live = await listener.during(asyncio.to_thread(sessions.rebuild, log, spending, underway))
    logger.info("%s: %d live sessions, %d bytes to send", log.source, live, log.waiting)
    is_required = settings.gateway.capture == "required"
    key_of_rewards = settings.reward.key.get_secret_value()
    recorder = Recorder(log, key_of_rewards, is_required=is_required, spending=spending, underway=underway)
    recorder.label_cut(sessions.live)
    awaited_policies = [one.awaited for one in waiting]
    gateway = Gateway(
        options,
        sessions,
        recorder,
        Fleet(options.policy, engines),
        None,
        awaited_policies=awaited_policies,
        principals=principals,
    )
    for served_policy in served_policies:
        gateway.engines.join(served_policy)
    if warning := settings.unbound:
        logger.warning("%s", warning)
    forwarder.start()
    watch = WorkersWatch(
        bus, full_name(settings.namespace, "workers"), asyncio.get_running_loop(), gateway.engines.observe
    )
    watch.start()
    address = f"http://{settings.gateway.host}:{settings.gateway.port}"
    beat = Heartbeat(bus, settings.namespace, worker=name, role="gateway", policy=options.policy, url=address)
    beat.start()
    guard = asyncio.create_task(_guard(forwarder))
    checkpoints = asyncio.create_task(_checkpoints(gateway))
    coming = asyncio.create_task(rest(waiting, bus, gateway))
    crossing = (
        Crossing(gateway, layout, Hops(settings.home, shared_dir), shared_dir) if len(layout.holders) > 1 else None
    )
    spare_collector()
    try:
        await serve(gateway, settings.gateway.host, settings.gateway.port, stop, upstreams, guard, crossing, listener)
    finally:
        guard.cancel()
        checkpoints.cancel()
        with suppress(asyncio.CancelledError):
            await checkpoints  # a thread that writes one goes on: the next is written behind it
        await _checkpoint(gateway)
        coming.cancel()
        await asyncio.to_thread(beat.close)
        watch.close()
        await asyncio.to_thread(principals.close)
        for one in waiting:
            await one.awaited.fleet.close()
        if upstreams is not None:
            await upstreams.close()
        await asyncio.to_thread(forwarder.close)
        underway.close()
        log.close()


def spare_collector() -> None:
    """Leave the garbage collector little to do, since it stops everybody and walks through all that a call has in the
    processor's caches: what is here by now stays and need not be looked at again, and what a call leaves is freed
    without it, but for few circles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECTED_AFTER, 20, 20)


def capture(settings: Settings, bus: Bus) -> tuple[CaptureLog, Forwarder]:
    """The capture log that the settings describe, and who sends it on, not started. What was sent is kept there for as
    long as it is in the topic."""
    kept_s, waiting = settings.topics.short_hours * 3600, settings.gateway.capture_max_bytes
    log = CaptureLog(settings.gateway.capture_dir, segment_s=kept_s / PARTS, max_waiting=waiting)
    topic, claims = full_name(settings.namespace, "raw"), ClaimStore(settings.claims)
    return log, Forwarder(log, bus, topic, claims, retention_s=kept_s)


async def _checkpoints(gateway: Gateway) -> None:
    """Write a checkpoint whenever the next start would have much to read without it. Runs until it is cancelled."""
    log, at, written_at = gateway.recorder.log, -checkpoint.ENTRIES, time.monotonic()
    while True:
        await asyncio.sleep(CHECK_S)  # the first too, whose copy would hold up the start
        now = time.monotonic()
        if log.end - at >= checkpoint.ENTRIES or (log.end > at and now - written_at > CHECKPOINT_S):
            at, written_at = log.end, now
            await _checkpoint(gateway)


async def _checkpoint(gateway: Gateway) -> None:
    """Write one. Never raises: without it the next start reads more of the log."""
    recorder = gateway.recorder
    try:
        write = gateway.sessions.checkpoint(recorder.log, recorder.spending, recorder.underway)
        await asyncio.to_thread(write)
    except (OSError, msgspec.MsgspecError, UnicodeError) as error:
        logger.warning("no checkpoint of %s is written: %s", recorder.log.folder, error)


async def _guard(forwarder: Forwarder) -> None:
    """Raises what ended the forwarder: a gateway that can never send on must not go on as if it could."""
    while forwarder.failed is None:
        await asyncio.sleep(1.0)
    raise forwarder.failed


async def serve(
    gateway: Gateway,
    host: str,
    port: int,
    stop: asyncio.Event,
    upstream: TextUpstream | Upstreams | None = None,
    guard: asyncio.Task[None] | None = None,
    crossing: Crossing | None = None,
    listener: Listener | None = None,
) -> None:
    """Serve `gateway` over HTTP until `stop` is set, or `guard` raises. `crossing` leads to its other processes;
    `listener` may have opened the port before."""
    app = make_app(gateway, upstream, gateway.options.public_url or _address(host, port), crossing)
    listener = listener or Listener(gateway.options.max_connections)
    if crossing is None:
        listener.lead_to(app, host, port)
    else:
        listener.open_socket(crossing.behind(app), crossing.socket)
        if not crossing.is_retired:
            listener.lead_to(crossing.around(app), host, port, is_shared=True)
    serving = asyncio.create_task(listener.end())
    reaper = asyncio.create_task(end_idle_episodes(gateway))
    stopping = asyncio.create_task(stop.wait())
    beside = [] if crossing is None else crossing.tasks()
    try:
        tasks = [serving, stopping, reaper, *beside, *([guard] if guard else [])]
        ended_tasks, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in ended_tasks:
            task.result()
    finally:
        for task in (stopping, reaper, *beside):
            task.cancel()
        gateway.stopping = True
        if not serving.done():
            await gateway.drain(DRAIN_S)
            if crossing is not None:
                await crossing.drain(DRAIN_S)
        serving.cancel()
        await listener.close()
        await gateway.drain(DRAIN_S)
        if crossing is not None:
            await crossing.hops.close()


def _address(host: str, port: int) -> str:
    """Where clients reach a gateway that listens there. What a request says of it is never believed."""
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
        logger.warning(
            "sessions are told http://%s:%d: set [gateway] public_url to where clients come from", host, port
        )
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
