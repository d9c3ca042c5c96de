"""Groups a second that one dispatch process orders, with the production runner: over the bus in memory (state, turns,
changelog and transactions as in production, no network) and over a real local broker.

A round grants B groups, completes them all and commits the version, so each group costs its prompt, its grant, its
completion, its release and its part of a ledger entry. Only the runner's steps are timed, not who writes its input: in
memory as CPU time, so that load beside it does not count, over a broker by the wall."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.study_async.desk import POLICY, START, completion, ledger_entry, prompt, version_zero
from millrace.infra.log.base import Outgoing, Record
from millrace.infra.log.kafka.bus import KafkaBus
from millrace.infra.log.topics import TopicSizes, full_name
from millrace.infra.machine.broker import Broker
from millrace.infra.stages.live import StageRunner
from millrace.infra.stages.slot import RunnerSettings
from millrace.schemas import codec
from millrace.streams.dispatch.stage import Dispatch, Terms
from millrace.testing.world import CALM, World

INPUTS = ("completions", "prompts", "ledger", "weights")
OUTPUTS = ("grants", "resolutions")
QUIET_S = 1.0
"""without a record for so long, everything is folded; not counted"""
Send = Callable[[str, str, dict[str, Any]], object]
"""(topic, schema, record)"""


def _terms() -> Terms:
    return Terms(lease=10**15)


def groups_per_second(
    send: Send,
    drain: Callable[[], float],
    read: Callable[[str], Iterable[Record]],
    batch: int,
    eta: int,
    rounds: int,
    size: int,
) -> float:
    """The rate over some rounds. drain: step until all is folded; gives the seconds that the steps took. read: what a
    topic holds. Raises AssertionError when not every group was ordered."""
    numbers = iter(range(1 << 30))

    def line(count: int) -> None:
        for _ in range(count):
            send("prompts", "Prompt", prompt(next(numbers)))

    send("weights", "WeightVersion", version_zero(batch, eta, size))
    line((eta + 1) * batch)
    send("completions", "Completion", completion(None, [], -1, -1, START))
    drain()
    seconds = 0.0
    shuffle = random.Random(0)
    for version in range(rounds):
        line(batch)
        tickets = list(range(version * batch, (version + 1) * batch))
        shuffle.shuffle(tickets)
        for ticket in tickets:
            send("completions", "Completion", completion(ticket, [1000] * size, version, version, START + version + 1))
        seconds += drain()
        send("ledger", "LedgerEntry", ledger_entry(version + 1, (version + 1) * batch))
        seconds += drain()
    ready = sum(record.headers["kind"] == b"ready" for record in read("resolutions"))
    assert ready == rounds * batch, f"{ready} of {rounds * batch} groups have a seq"
    return rounds * batch / seconds


def in_memory(batch: int, eta: int, rounds: int = 3, size: int = 16) -> float:
    """Groups a second over the bus in memory."""
    topics = {f"{POLICY}.{name}": 1 for name in (*INPUTS, *OUTPUTS)} | {"decisions": 1, "dlq": 1}
    with World(0, topics, [lambda: Dispatch(POLICY, 1, _terms())], workers=1, chances=CALM, turn_records=500) as world:

        def drain() -> float:
            begin = time.process_time()
            world.drain()
            return time.process_time() - begin

        return groups_per_second(
            lambda topic, name, record: world.send(f"{POLICY}.{topic}", "k", name, record),
            drain,
            lambda topic: world.records(f"{POLICY}.{topic}"),
            batch,
            eta,
            rounds,
            size,
        )


@contextmanager
def broker() -> Iterator[str]:
    """A broker of its own, as `millrace up` starts one."""
    with tempfile.TemporaryDirectory() as directory, Broker(Path(directory) / "broker") as server:
        server.start()
        yield server.bootstrap


def over_broker(bootstrap: str, batch: int, eta: int, rounds: int = 3, size: int = 16) -> float:
    """Groups a second over a real broker."""
    layout = TopicSizes(f"rate{batch}x{eta}", POLICY, slots=1, shards=1)

    def full(topic: str) -> str:
        return full_name(layout.namespace, f"{POLICY}.{topic}")

    with KafkaBus(bootstrap) as bus:
        bus.ensure_topics(layout.specs())
        runner = StageRunner(bus, Dispatch(POLICY, 1, _terms()), RunnerSettings(layout.namespace))
        with bus.publisher() as publisher:

            def drain() -> float:
                publisher.flush(60)
                begin = last = time.perf_counter()
                while time.perf_counter() - last < QUIET_S:
                    if runner.step(0.05):
                        last = time.perf_counter()
                return last - begin

            try:
                return groups_per_second(
                    lambda topic, name, record: publisher.publish(
                        Outgoing(full(topic), b"k", codec.encode_by_name(name, record))
                    ),
                    drain,
                    lambda topic: bus.read(full(topic), 0),
                    batch,
                    eta,
                    rounds,
                    size,
                )
            finally:
                runner.close()
