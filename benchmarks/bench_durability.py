"""What it costs that the local broker syncs every record before it answers: `[kafka] sync`.

    python -m benchmarks.bench_durability [--records 20000] [--transactions 200]

For a broker with and without: records of 1 KB a second through one publisher, and milliseconds of a transaction that
writes one record to each of four partitions. The disk decides: run it where `[home]` lies.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from millrace.infra.log.base import Outgoing, TopicSpec
from millrace.infra.log.kafka.bus import KafkaBus
from millrace.infra.machine.broker import Broker

PARTITIONS = 4
VALUE = bytes(1024)


def measure(home: Path, sync: bool, records: int, transactions: int) -> tuple[float, float]:
    """(records a second, milliseconds of a transaction)."""
    with Broker(home, sync=sync) as broker:
        broker.start()
        with KafkaBus(broker.bootstrap) as bus:
            bus.ensure_topics([TopicSpec("t", PARTITIONS)])
            with bus.publisher() as publisher:
                publisher.publish(Outgoing("t", b"", VALUE, partition=0)).result(60)
                began = time.perf_counter()
                for number in range(records):
                    publisher.publish(Outgoing("t", b"", VALUE, partition=number % PARTITIONS))
                publisher.flush(300)
                rate = records / (time.perf_counter() - began)
            with bus.transactor("one") as transactor:
                began = time.perf_counter()
                for _ in range(transactions):
                    transactor.begin()
                    for partition in range(PARTITIONS):
                        transactor.send(Outgoing("t", b"", VALUE, partition=partition))
                    transactor.commit({}, None)
                took = (time.perf_counter() - began) / transactions * 1000
    return rate, took


def main() -> None:
    """Parses the flags and prints a line each, then the ratio."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_durability", description=__doc__)
    parser.add_argument("--records", type=int, default=20_000)
    parser.add_argument("--transactions", type=int, default=200)
    parser.add_argument("--home", type=Path, default=None, help="on the disk to measure; default: a temporary folder")
    options = parser.parse_args()
    found = {}
    for sync in (False, True):
        with tempfile.TemporaryDirectory(dir=options.home) as folder:
            found[sync] = measure(Path(folder), sync, options.records, options.transactions)
        rate, took = found[sync]
        print(f"sync {'on ' if sync else 'off'}: {rate:8.0f} records/s, {took:6.1f} ms a transaction", flush=True)
    (rate, took), (synced_rate, synced_took) = found[False], found[True]
    print(f"with sync: {synced_rate / rate:.2f} of the records, {synced_took / took:.2f} times as long a transaction")


if __name__ == "__main__":
    main()
