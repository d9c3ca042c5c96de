"""A forwarder as a process to kill: `python -m tests.producers.capture.forwarder_process BROKER TOPIC FOLDER`

It sends what the capture log of FOLDER holds and ends; 1 when it could not send all of it."""

from __future__ import annotations

import sys
from pathlib import Path

from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.kafka.bus import KafkaBus
from millrace.producers.capture.forwarder import Forwarder
from millrace.producers.capture.log import CaptureLog

PATIENCE_S = 240.0


def main() -> int:
    bootstrap, topic, folder = sys.argv[1:]
    log = CaptureLog(Path(folder) / "log")
    with KafkaBus(bootstrap) as bus:
        sender = Forwarder(log, bus, topic, ClaimStore(str(Path(folder) / "claims")))
        sender.start()
        sent = sender.drain(PATIENCE_S)
        sender.close()
    log.close()
    return 0 if sent else 1


if __name__ == "__main__":
    sys.exit(main())
