"""The audit's CPU time for a thousand events: `python -m benchmarks.bench_audit --actions 16000 --rounds 5`.

The history lies in memory, as production runner and stages wrote it: small events (.4 KB) in turns of a few records,
where what a record costs beside its bytes shows most. The named limit is four times decoding every record of it and
every body of an event once with bare fastavro, in the same round."""

from __future__ import annotations

import argparse
import io
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from fastavro import schemaless_reader

from millrace.schemas import codec
from millrace.schemas.registry import current
from tests.support.whole import KINDS, whole

LIMIT = 4.0


def cpu(work: Callable[[], Any]) -> float:
    """CPU milliseconds."""
    began = time.process_time()
    work()
    return (time.process_time() - began) * 1e3


def main() -> None:
    """Prints the least of the rounds for each part: what it takes once nothing disturbs it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--actions", type=int, default=16_000, help="of the history's scheduler: about .4 events each")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    logging.disable()  # zombies that the history's runners fence
    try:
        history = whole(0, options.actions, isolate=True)
    finally:
        logging.disable(logging.NOTSET)
    records = [record.value for kind in KINDS for record in history.records(kind) if record.value]
    values = [value for value in records if value[:2] == codec.MARK]
    thousands = sum(1 for _ in history.records("events")) / 1e3

    def decode(value: bytes) -> None:
        name = codec.name_of(value)
        record: Any = schemaless_reader(io.BytesIO(value[codec.HEAD :]), current(name).definition, None)
        if name == "Event":
            decode(record["body"])

    assert history.audit().clean, "every law holds of the history"
    parts = (lambda: deque(map(decode, values), 0), lambda: history.audit(quick=True), history.audit)
    times = [tuple(map(cpu, parts)) for _ in range(options.rounds)]
    once, laws, whole_audit = (min(part) / thousands for part in zip(*times, strict=True))
    print(f"{thousands * 1e3:.0f} events among {len(records)} records, ms of CPU a thousand events")
    print(f"   decoding once {once:6.1f}")
    print(f"   walk and laws {laws:6.1f}")
    print(f"   folding again {whole_audit - laws:6.1f}")
    print(f"   the audit     {whole_audit:6.1f}")
    ratio = whole_audit / once
    print(f"ratio to decoding once: {ratio:.1f} (limit {LIMIT:.0f}: {ratio / LIMIT:.2f} of it)")


if __name__ == "__main__":
    main()
