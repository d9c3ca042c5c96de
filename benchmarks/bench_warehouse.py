"""Ingest into the warehouse's tables, in CPU time: `python -m benchmarks.bench_warehouse --large 8000 --small 200000`.

Large rows are model calls of about 19 KB; the limit is 2.5 times the CPU of a bare insert of the same rows in
ClickHouse's own Native format. Small ones are rewards as events, and completions; the limit is 50,000 a CPU second.
Both are read from a log in memory: reading, sorting, framing and inserting count, a broker does not. Merges wait."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench_codec import event, model_call
from millrace.consumers.warehouse.ingest.ingest import Ingest
from millrace.consumers.warehouse.store.directory import TableDirectory
from millrace.consumers.warehouse.store.migrations import migrate
from millrace.infra.log.base import Outgoing, TopicSpec
from millrace.infra.log.memory.bus import MemoryBus
from millrace.schemas import arrays, codec
from millrace.schemas.ids import new_id

NS, TOKENS = "bench", 1482
NATIVE, SMALL = 0.4, 50_000


def large(count: int) -> Iterator[bytes]:
    """Model calls of TOKENS tokens, half prompt."""
    random, half = np.random.default_rng(0), TOKENS // 2
    call = model_call() | {"request": b"q" * 1024, "response": b"a" * 6144}
    for _ in range(count):
        ids = random.integers(0, 32_000, TOKENS, dtype=np.int32)
        call |= {"prompt_ids": arrays.pack(ids[:half]), "output_ids": arrays.pack(ids[half:])}
        call |= {"output_logprobs": arrays.pack(-random.random(half, dtype=np.float32)), "response_id": new_id()}
        call |= {"output_versions": arrays.pack(np.full(half, 7, np.int32))}
        yield codec.encode_by_name("Event", event(codec.encode_body("model_call", call)))


def rewards(count: int) -> Iterator[bytes]:
    """Rewards, as events."""
    body: dict[str, Any] = {"target_kind": "trajectory", "target": new_id(), "source": "verifier", "value": 1.0}
    body |= {"source_version": "exact", "rubric_version": "1", "components": {"exact": 1.0}, "independent": True}
    body |= dict.fromkeys(("span_start", "span_end", "label", "failure", "critique", "supersedes", "signal"))
    body |= {"confidence": None, "observed_at": 1}
    for _ in range(count):
        whole = event(codec.encode_by_name("Reward", body | {"reward_id": new_id()})) | {"kind": "reward"}
        yield codec.encode_by_name("Event", whole)


def completions(count: int) -> Iterator[bytes]:
    """What seal says of groups of eight."""
    place = {"topic": f"{NS}.sort.trajectories", "partition": 3, "offset": 12345}
    record: dict[str, Any] = {"kind": "complete", "policy": "sort", "slot": 0, "size": 8, "samples": list(range(8))}
    record |= {"missing": [], "trajectories": [place] * 8, "tokens": [64] * 8, "rewards": [1.0] * 8, "v_head": 1}
    record |= {"v_tail": 2, "reason": None, "time": 1}
    for ticket in range(count):
        yield codec.encode_by_name("Completion", record | {"group": f"{ticket}", "ticket": ticket})


def ingested(name: str, values: Iterator[bytes], store: TableDirectory) -> tuple[float, int]:
    """CPU seconds to take in a topic of these values, and their bytes."""
    bus, topic, size = MemoryBus(), f"{NS}.{name}", 0
    bus.ensure_topics([TopicSpec(topic, 1)])
    publisher = bus.publisher()
    for value in values:
        publisher.publish(Outgoing(topic, b"k", value, partition=0))
        size += len(value)
    ingest = Ingest(bus, store, NS, lambda data: data)
    started = time.process_time()
    ingest.catch_up()
    return time.process_time() - started, size


def native(store: TableDirectory, home: Path) -> float:
    """CPU seconds of a bare insert of the rows of `events`, in blocks like the warehouse's."""
    with store.handle() as handle:
        handle.query("CREATE TABLE millrace_log.bare AS millrace_log.events")
        parts = []
        ((count,),) = store.rows("SELECT count() FROM events")
        for first in range(0, count, 1000):
            file = home / f"{first}.native"
            answer = handle.query(f"SELECT * FROM millrace_log.events ORDER BY off LIMIT {first}, 1000", "Native")
            file.write_bytes(answer.bytes())
            parts.append(file)
        started = time.process_time()
        for file in parts:
            handle.query(
                f"INSERT INTO millrace_log.bare SETTINGS async_insert = 0, max_insert_threads = 1, max_threads = 1 "
                f"SELECT * FROM file('{file}', 'Native')"
            )
        return time.process_time() - started


def main() -> None:
    """Prints rows a CPU second, and the ratios to the two limits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", type=int, default=8000, help="rows of about 19 KB")
    parser.add_argument("--small", type=int, default=200_000, help="rows of each small kind")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, TableDirectory(Path(folder) / "warehouse") as store:
        migrate(store)
        store.run("SYSTEM STOP MERGES")
        mine, size = ingested("events", large(options.large), store)
        bare = native(store, Path(folder))
        print(
            f"{options.large} model calls of {size / options.large:.0f} bytes: {options.large / mine:.0f} a CPU second"
        )
        print(f"bare Native: {options.large / bare:.0f} a CPU second")
        print(f"ratio to a bare Native insert: {bare / mine:.2f} (limit {NATIVE})")
        for table in ("events", "blocks"):  # what comes next is another topic of the same name
            store.run(f"TRUNCATE TABLE millrace_log.{table}")
        for name, kind, values in (
            ("events", "rewards as events", rewards(options.small)),
            ("sort.completions", "completions", completions(options.small)),
        ):
            seconds, size = ingested(name, values, store)
            rate = options.small / seconds
            print(f"{options.small} {kind} of {size / options.small:.0f} bytes: {rate:.0f} a CPU second")
            print(f"ratio to {SMALL} a CPU second: {rate / SMALL:.2f}")
        print(f"peak memory {_peak()} MB")


def _peak() -> int:
    status = Path(f"/proc/{os.getpid()}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) >> 10


if __name__ == "__main__":
    main()
