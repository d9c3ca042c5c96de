"""A receiver of OTLP as a process to kill: `python -m tests.support.otlp_process FOLDER PORT QUIET_S`

It has the key `k` of tenant `acme` and sends nothing on: what it makes stays in FOLDER/events."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

from millrace.dialects.all import is_minted
from millrace.infra.process.net import LOCALHOST
from millrace.producers.capture.log import CaptureLog
from millrace.producers.gateway.options import GatewayOptions
from millrace.producers.intake.otlp.app import OtlpEndpoint
from millrace.producers.intake.otlp.assembler import SECOND, Assembler
from millrace.producers.intake.otlp.receiver import OtlpReceiver
from millrace.producers.intake.otlp.serve import serve

KEY = "k"
TENANT = "acme"


def made(folder: Path, quiet_s: float, max_waiting: int = 1 << 30) -> OtlpReceiver:
    """The receiver over a folder."""
    spans = CaptureLog(folder / "spans", name="otlp", max_waiting=max_waiting)
    events = CaptureLog(folder / "events", name="otlp")
    return OtlpReceiver(spans, events, Assembler("p", int(quiet_s * SECOND)), is_captured=is_minted)


def options(limit: int = 1 << 20) -> GatewayOptions:
    return GatewayOptions("p", keys={KEY: TENANT}, max_body_bytes=limit, max_in_flight=64)


async def main() -> None:
    folder, port, quiet_s = sys.argv[1:]
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    receiver = made(Path(folder), float(quiet_s))
    await serve(OtlpEndpoint(receiver, options()), LOCALHOST, int(port), stop)
    receiver.close()


if __name__ == "__main__":
    asyncio.run(main())
