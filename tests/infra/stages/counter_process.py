"""The counter stage as a process to kill: `python -m tests.infra.stages.counter_process BROKER NAMESPACE CLAIMS PAD`"""

from __future__ import annotations

import signal
import sys
import threading

from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.kafka.bus import KafkaBus
from millrace.infra.stages.live import run_stage
from millrace.infra.stages.slot import RunnerSettings
from tests.support.counter import Counter


def main() -> None:
    bootstrap, namespace, claims, pad = sys.argv[1:]
    store = ClaimStore(claims) if claims else None
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with KafkaBus(bootstrap, session_timeout_s=1.0) as bus:
        run_stage(bus, Counter(int(pad)), RunnerSettings(namespace, claims=store, turn_records=20, isolate=False), stop)


if __name__ == "__main__":
    main()
