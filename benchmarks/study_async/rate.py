"""Groups a second that one dispatch process orders, with the production runner: state, turns, changelog and
transactions as in production, over any bus.

A round grants B groups, completes them all and commits the version, so each group costs its prompt, its grant, its
completion, its release and its part of a ledger entry. Only the runner's steps are timed, not who writes its input."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from benchmarks.study_async import records
from millrace.infra.log.base import Bus, Outgoing
from millrace.infra.log.topics import TopicSizes, full_name
from millrace.infra.stages.live import StageRunner
from millrace.infra.stages.slot import RunnerSettings
from millrace.schemas import codec

QUIET_S = 1.0
"""without a record for so long, everything is folded; not counted"""


def groups_per_second(
    bus: Bus, clock: Callable[[], float], batch: int, eta: int, rounds: int = 3, size: int = 16
) -> float:
    """The rate over some rounds of groups of `size`, in seconds of `clock`."""
    layout = TopicSizes(f"rate{batch}x{eta}", records.POLICY, slots=1, shards=1)
    bus.ensure_topics(layout.specs())
    runner = StageRunner(bus, records.dispatcher(), RunnerSettings(layout.namespace))
    publisher = bus.publisher()
    shuffle, seconds = random.Random(0), 0.0

    def send(topic: str, schema: str, record: object) -> None:
        full = full_name(layout.namespace, topic)
        publisher.publish(Outgoing(full, b"k", codec.encode_by_name(schema, record)))

    def drain() -> float:
        publisher.flush(60)
        last = time.perf_counter()
        begin = end = clock()
        while time.perf_counter() - last < QUIET_S:
            if runner.step(0.05):
                last, end = time.perf_counter(), clock()
        return end - begin

    try:
        send(*records.version_zero(batch, eta, size))
        for number in range((eta + 1) * batch):
            send(*records.prompt(number))
        send(*records.completion(None, [], -1, -1, 0.0))
        drain()
        for version in range(rounds):
            tickets = list(range(version * batch, (version + 1) * batch))
            for ticket in tickets:
                send(*records.prompt((eta + 1) * batch + ticket))
            for ticket in shuffle.sample(tickets, batch):
                send(*records.completion(ticket, [1000] * size, version, version, version + 1.0))
            seconds += drain()
            send(*records.commit(version + 1, (version + 1) * batch))
            seconds += drain()
    finally:
        runner.close()
        publisher.close()
    topic = full_name(layout.namespace, f"{records.POLICY}.resolutions")
    ready = sum(record.headers["kind"] == b"ready" for record in bus.read(topic, 0))
    assert ready == rounds * batch, f"{ready} of {rounds * batch} groups have a seq"
    return rounds * batch / seconds
