"""Refine, seal and dispatch against a bare transactional copy of the same records, on one real broker, in one run.

    python -m benchmarks.bench_stages [--records 8000] [--rounds 3]

The traffic is whole groups: two samples of a ticket, eight model calls each, with start, end and reward, in steps of
1 KiB and of 30 KiB. The copy reads `raw` and writes it to another topic in transactions of the runner's size. Each
stage then folds the same traffic, one after the other in this process with the production runner, state, turns and
detectors, so the sum is what one core pays; live, the three run beside each other. A ratio of 3 means: three times the
time of the copy."""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from millrace.infra.config import Governance
from millrace.infra.log.base import Bus, Outgoing, TopicSpec
from millrace.infra.log.kafka.bus import KafkaBus
from millrace.infra.log.topics import TopicSizes, full_name
from millrace.infra.machine.broker import Broker
from millrace.infra.stages.base import Stage
from millrace.infra.stages.live import StageRunner
from millrace.infra.stages.slot import RunnerSettings
from millrace.schemas import codec
from millrace.schemas.ids import now_micros
from millrace.streams.dispatch.stage import Dispatch, Terms
from millrace.streams.refine.detectors.guard import GuardedDetectors
from millrace.streams.refine.stage import Refine
from millrace.streams.seal.stage import Seal
from millrace.streams.serve import DETECTORS
from millrace.testing.events import Episode
from tests.support.players import Plan, version_zero

POLICY = "p"
CALLS = 8
SAMPLES = 2
LEASE = 86_400_000_000
"""in us: however slow the machine is, no group of the traffic is given up"""
PER_GROUP = SAMPLES * (CALLS + 3)
TURN_RECORDS, TURN_BYTES = 500, 4 << 20
PROSE = (
    "The agent reads the file, runs the tests and explains what failed; def merge(left, right): return sorted(left + "
    "right)  # see section 4.2 of the guide. Exit code 0 after 12.5 s, 3 warnings in module core.queue. "
)


def traffic(groups: int, size: int) -> Iterator[Outgoing]:
    """Raw records, numbered as one gateway's; about `size` bytes each model call."""
    # A third of a big step is token arrays, the rest is what client and engine said.
    tokens = max(8, size // 48)
    text = (PROSE * (size // len(PROSE) + 1))[: max(40, size - tokens * 16 - 420)]
    request = orjson.dumps({"messages": [{"role": "user", "content": text}]})
    number = 0
    for ticket in range(groups):
        for sample in range(SAMPLES):
            root = f"{ticket:08d}-{sample}-{os.urandom(4).hex()}"
            episode = Episode(root, policy=POLICY, ticket=ticket, size=SAMPLES, sample=sample)
            events = [episode.start()]
            for n in range(CALLS):
                prompt, output = range(tokens // 2), range(tokens // 2)
                keep = n * 2 * (tokens // 2)
                events.append(episode.call(f"{root}-{n}", prompt=prompt, output=output, keep=keep, request=request))
            events += [episode.end(), episode.reward(1.0, judge=None)]
            for event in events:
                headers = {"source": b"gateway-0", "source-seq": b"%d" % number, "kind": event["kind"].encode()}
                number += 1
                yield Outgoing("", episode.key.encode(), codec.encode("Event", event), headers)


def fill(bus: Bus, layout: TopicSizes, records: Sequence[Outgoing]) -> int:
    """Write the traffic into `raw`, so that every turn has its full size; returns its bytes."""
    raw = full_name(layout.namespace, "raw")
    with bus.publisher() as publisher:
        for out in records:
            publisher.publish(Outgoing(raw, out.key, out.value, out.headers))
        publisher.flush(120)
    return sum(len(out.value or b"") for out in records)


def copy(bus: Bus, layout: TopicSizes, count: int) -> float:
    """Seconds to read `count` records of `raw` and write them to another topic, in transactions with their offsets."""
    raw, copied = full_name(layout.namespace, "raw"), full_name(layout.namespace, "copied")
    member = bus.member(f"{layout.namespace}.copy", raw)
    transactor = bus.transactor(f"{layout.namespace}.copy")
    while len(member.assignment()) < layout.slots:
        member.poll(1, 0.1)
        for partition in member.assignment():
            member.seek(partition, 0)
    began, done = time.perf_counter(), 0
    while done < count:
        records = member.poll(TURN_RECORDS, 0.1)
        if not records:
            continue
        token = member.token()
        transactor.begin()
        positions = {}
        for record in records:
            transactor.send(Outgoing(copied, record.key, record.value, record.headers, record.partition))
            positions[raw, record.partition] = record.offset + 1
        transactor.commit(positions, token)
        done += len(records)
    seconds = time.perf_counter() - began
    transactor.close()
    member.close()
    return seconds


def fold(bus: Bus, layout: TopicSizes, stage: Stage, done: Callable[[], bool] = lambda: True) -> float:
    """Seconds until all that its primary topic holds was folded, and `done`, from when every slot was open."""
    settings = RunnerSettings(layout.namespace, turn_records=TURN_RECORDS, turn_bytes=TURN_BYTES)
    runner = StageRunner(bus, stage, settings)
    topic = full_name(layout.namespace, stage.primary)
    ends = {p: max((r.offset + 1 for r in bus.read(topic, p)), default=0) for p in range(bus.partitions(topic))}
    try:
        while len(runner.slots) < len(ends):
            runner.step(0.1)
        began = time.perf_counter()
        while any(runner.slots[p].position < end for p, end in ends.items()) or not done():
            runner.step(0.1)
        return time.perf_counter() - began
    finally:
        runner.close()


def written(bus: Bus, topic: str) -> int:
    """Committed records of a topic."""
    return sum(1 for partition in range(bus.partitions(topic)) for _ in bus.read(topic, partition))


def one_round(bus: Bus, number: int, size: int, records: int) -> dict[str, float]:
    """Seconds of the copy and of each stage for the same traffic, in a namespace of its own."""
    layout = TopicSizes(f"b{size}x{number}", POLICY, slots=2, shards=2)
    copied = TopicSpec(full_name(layout.namespace, "copied"), layout.slots)
    bus.ensure_topics([*layout.specs(), copied])
    groups = max(1, records // PER_GROUP)
    made = list(traffic(groups, size))
    steps = [len(out.value or b"") for out in made if out.headers["kind"] == b"model_call"]
    print(f"   {len(made)} records, model calls of {statistics.mean(steps) / 1024:.1f} KiB", flush=True)
    dispatch = Dispatch(POLICY, layout.slots, Terms(lease=LEASE))
    seed_dispatch(bus, layout, groups)
    grants = full_name(layout.namespace, f"{POLICY}.grants")
    fold(bus, layout, dispatch, lambda: written(bus, grants) == groups)
    fill(bus, layout, made)
    detectors = GuardedDetectors(DETECTORS)
    try:
        seconds = {"copy": copy(bus, layout, len(made))}
        seconds["refine"] = fold(bus, layout, Refine(Governance(), [detectors], slots=2))
    finally:
        detectors.close()
    seconds["seal"] = fold(bus, layout, Seal([POLICY]))
    seconds["dispatch"] = fold(bus, layout, dispatch)
    ready = [r for r in _resolutions(bus, layout) if r["kind"] == "ready"]
    assert len(ready) == groups, f"{len(ready)} of {groups} groups became ready"
    # Once more behind the stages, so that a machine that slows down slows both.
    seconds["copy"] = (seconds["copy"] + copy(bus, layout, len(made))) / 2
    return seconds


def seed_dispatch(bus: Bus, layout: TopicSizes, groups: int) -> None:
    """Version 0 with room for every group, their prompts, and a time for each slot, so that all are granted."""
    import random

    plan = Plan(random.Random(0), groups, 0, SAMPLES, layout.slots, "reserve", 0.0, "drop")
    event, entry = version_zero(plan)
    out = [("weights", "WeightVersion", event), ("ledger", "LedgerEntry", entry)]
    for n in range(groups):
        prompt: dict[str, Any] = {"id": f"t{n}", "policy": POLICY, "number": n, "task": "{}", "awaits": []}
        out.append(("prompts", "Prompt", prompt | {"group_size": None}))
    for slot in range(layout.slots):
        passed = {"kind": "progress", "policy": POLICY, "slot": slot, "time": now_micros(), "group": "", "ticket": None}
        passed |= {name: [] for name in ("samples", "missing", "trajectories", "tokens", "rewards")}
        out.append(("completions", "Completion", passed | {"size": 0, "v_head": -1, "v_tail": -1, "reason": None}))
    with bus.publisher() as publisher:
        for topic, name, record in out:
            full = full_name(layout.namespace, f"{POLICY}.{topic}")
            publisher.publish(Outgoing(full, b"k", codec.encode(name, record)))
        publisher.flush(60)


def _resolutions(bus: Bus, layout: TopicSizes) -> Iterator[dict[str, Any]]:
    for record in bus.read(full_name(layout.namespace, f"{POLICY}.resolutions"), 0):
        yield codec.decode_as("Resolution", record.value or b"")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=8000, help="raw records of 1 KiB a round; a quarter of 30 KiB")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, Broker(Path(directory) / "broker") as broker:
        broker.start()
        with KafkaBus(broker.bootstrap) as bus:
            for size, records in ((1024, arguments.records), (30 * 1024, arguments.records // 4)):
                print(f"{size // 1024} KiB steps")
                rounds = [one_round(bus, n, size, records) for n in range(arguments.rounds)]
                report(rounds, records)


def report(rounds: Sequence[dict[str, float]], records: int) -> None:
    """Medians over the rounds: records a second, and the ratio to the copy of the same round."""
    ratios: dict[str, list[float]] = {}
    for seconds in rounds:
        parts = {name: took / seconds["copy"] for name, took in seconds.items()}
        parts["sum"] = sum(ratio for name, ratio in parts.items() if name != "copy")
        for name, ratio in parts.items():
            ratios.setdefault(name, []).append(ratio)
    for name, found in ratios.items():
        rate = "" if name == "sum" else f"{records / statistics.median(s[name] for s in rounds):>10,.0f} records/s"
        print(f"   {name:<10}{statistics.median(found):>6.2f} x copy  ({min(found):.2f} to {max(found):.2f}){rate}")


if __name__ == "__main__":
    main()
