"""The counter stage as a process, to be killed: `python -m tests.support.counter_process BROKER NAMESPACE`."""

from __future__ import annotations

import signal
import sys
import threading

from infra.bus.kafka import KafkaBus
from infra.runner.live import run_stage
from infra.runner.slot import Settings
from tests.support.counter import Counter


def main() -> None:
    bootstrap, namespace = sys.argv[1:]
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with KafkaBus(bootstrap, session_timeout_s=1.0) as bus:
        run_stage(bus, Counter(), Settings(namespace, turn_records=20), stop)


if __name__ == "__main__":
    main()
