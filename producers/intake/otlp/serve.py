"""The process `millrace otlp`: the server, both logs, who ends conversations and who sends on.

Order of life: the logs are folded before the port is opened; on SIGTERM new requests get 503, those in flight end, the
port is closed, and what was made is sent on. Conversations that are open stay so: the next start goes on with them."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import uvloop
from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP1Settings
from granian.log import LogLevels
from granian.server.embed import Server

from millrace.dialects.all import is_minted
from millrace.infra.config import Settings
from millrace.infra.connect import connect
from millrace.infra.heartbeat import Heartbeat, unless_in
from millrace.infra.log.base import Bus
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.topics import PARTS, full_name
from millrace.infra.process.ending import stop_event
from millrace.producers.capture.forwarder import Forwarder
from millrace.producers.capture.log import CaptureLog
from millrace.producers.capture.recent import Recent
from millrace.producers.gateway.options import GatewayOptions
from millrace.producers.intake.otlp.app import OtlpEndpoint
from millrace.producers.intake.otlp.assembler import SECOND, Assembler
from millrace.producers.intake.otlp.receiver import KEPT_S, OtlpReceiver
from millrace.schemas import bounds

logger = logging.getLogger(__name__)

DRAIN_S = 5.0
TICK_S = 0.5


def run(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT."""
    with connect(settings) as bus:
        uvloop.run(_run(settings, bus))


async def _run(settings: Settings, bus: Bus) -> None:
    stop = stop_event()
    receiver, forwarder = open_receiver(settings, bus)
    otlp = settings.otlp
    logger.info(
        "%s: %d open traces, %d bytes to send", receiver.events.source, receiver.assembler.open, receiver.events.waiting
    )
    forwarder.start()
    endpoint = OtlpEndpoint(
        receiver, replace(GatewayOptions.of(settings, bounds.INT), max_body_bytes=otlp.max_body_bytes)
    )
    beat = Heartbeat(
        bus,
        settings.namespace,
        worker=os.environ.get("MILLRACE_ROLE") or f"otlp-{otlp.port}",
        role="otlp",
        policy=settings.policy.name,
        url=f"http://{otlp.host}:{otlp.port}",
        standing=unless_in(lambda: receiver.trouble),
    )
    beat.start()
    try:
        await serve(endpoint, otlp.host, otlp.port, stop, lambda: forwarder.failed)
    finally:
        await asyncio.to_thread(beat.close)
        await asyncio.to_thread(forwarder.close)
        receiver.close()


def open_receiver(settings: Settings, bus: Bus) -> tuple[OtlpReceiver, Forwarder]:
    """The receiver that the settings describe, and who sends its events on, not started."""
    otlp, home = settings.otlp, settings.otlp_home
    kept_s = max(settings.topics.short_hours * 3600, KEPT_S)
    spans = CaptureLog(home / "spans", name="otlp", segment_s=KEPT_S / PARTS, max_waiting=otlp.max_open_bytes)
    spans.recent = Recent(0)  # nobody follows it
    events = CaptureLog(
        home / "events", name="otlp", segment_s=kept_s / PARTS, max_waiting=settings.gateway.capture_max_bytes
    )
    assembler = Assembler(settings.policy.name, int(otlp.quiet_s * SECOND))
    reward_key = settings.reward.key.get_secret_value()
    receiver = OtlpReceiver(spans, events, assembler, reward_key=reward_key, is_captured=is_minted)
    topic = full_name(settings.namespace, "raw")
    return receiver, Forwarder(events, bus, topic, ClaimStore(settings.claims), retention_s=kept_s)


async def serve(
    endpoint: OtlpEndpoint,
    host: str,
    port: int,
    stop: asyncio.Event,
    failure: Callable[[], Exception | None] = lambda: None,
) -> None:
    """Serve over HTTP until `stop` is set. Raises what `failure` gives."""
    server = Server(
        endpoint.app,
        host,
        port,
        interface=Interfaces.ASGINL,
        http=HTTPModes.http1,  # the limits below are those of HTTP/1
        websockets=False,
        log_level=LogLevels.warning,
        backlog=1024,
        http1_settings=HTTP1Settings(header_read_timeout=30_000, max_buffer_size=bounds.HEADER_BYTES),
    )
    serving = asyncio.create_task(server.serve())
    tending = asyncio.create_task(_tend(endpoint, failure))
    stopping = asyncio.create_task(stop.wait())
    try:
        tasks, _ = await asyncio.wait([serving, tending, stopping], return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.result()
    finally:
        stopping.cancel()
        tending.cancel()
        endpoint.stopping = True
        with suppress(TimeoutError):  # whoever is not answered by then sends again
            async with asyncio.timeout(DRAIN_S):
                while endpoint.busy:
                    await asyncio.sleep(0.01)
        if not serving.done():
            server.main_loop_interrupt.set()
            server.interrupt_signal = True
        await serving


async def _tend(endpoint: OtlpEndpoint, failure: Callable[[], Exception | None]) -> None:
    """End what is over, for as long as there is something to end."""
    while True:
        if (error := failure()) is not None:
            raise error
        await asyncio.to_thread(endpoint.receiver.close_due)
        await asyncio.to_thread(endpoint.receiver.tend)
        await asyncio.sleep(TICK_S)
