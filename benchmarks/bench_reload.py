"""From a weight event to a served version: `python -m benchmarks.bench_reload [--engine vllm] [--weights broadcast]`.

A real broker, a real engine process and the production reloader. Measured from the moment the event's write is
acknowledged: until the reloader has checked and frozen, until the engine serves (resumed), and until the first
token with the new label arrives at a client, while `--load` requests are being sampled. The printed ratio is that
time over a bare swap of the same directories (pause, load, reset, label, resume, called directly) in the same run.
`--weights`: from a directory, by broadcast from a learner's sender in this process, or composed of deltas."""

from __future__ import annotations

import argparse
import asyncio
import logging
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.serving import KINDS, client_of, served
from millrace.consumers.learner.version.sender import WeightSender
from millrace.consumers.reloader.broadcast import FromLearner
from millrace.consumers.reloader.shell import Reloader
from millrace.consumers.reloader.transport import SharedDirectory, WeightTransport
from millrace.infra.engines.base import Engine, Sampling
from millrace.infra.engines.control import EngineControl, PauseMode
from millrace.infra.log.base import Outgoing, TopicSpec
from millrace.infra.log.kafka.bus import KafkaBus
from millrace.infra.machine.broker import Broker
from millrace.infra.process.net import LOCALHOST
from millrace.schemas import codec
from millrace.schemas.labels import make_label
from millrace.schemas.records import WeightVersion
from tests.consumers.reloader.chains import write_chain
from tests.support.announced import POLICY, announce, weight_event
from tests.support.engines import until
from tests.support.tiny_model import write_model

NAMESPACE = "bench-reload"
WEIGHTS, WORKERS = f"{NAMESPACE}.{POLICY}.weights", f"{NAMESPACE}.workers"


class SwapTimes:
    """When the last swap froze and resumed the engine behind `control`."""

    def __init__(self, control: EngineControl) -> None:
        self.frozen_at = self.resumed_at = 0.0
        pause, resume = control.pause, control.resume

        async def timed_pause(mode: PauseMode = "keep") -> None:
            await pause(mode)
            self.frozen_at = time.perf_counter()

        async def timed_resume() -> None:
            await resume()
            self.resumed_at = time.perf_counter()

        control.pause, control.resume = timed_pause, timed_resume


@dataclass(frozen=True)
class WeightPath:
    """events: of versions 0 to n; sender: who broadcasts them."""

    events: dict[int, WeightVersion]
    transport: WeightTransport
    sender: WeightSender | None = None

    def announce(self, version: int) -> WeightVersion:
        """The event of a version, which can be had from now on."""
        event = self.events[version]
        if self.sender is None:
            return event
        self.sender.hold(version, event["digest"], Path(event["uri"]) / "model.safetensors")
        return {**event, "broadcast": self.sender.url}


def path_of(weights: str, folders: list[Path], root: Path, versions: int, stack: ExitStack) -> WeightPath:
    """The events of versions 0 to `versions`, which come from `folders` by turns, or as changes of the first."""
    if weights == "delta":
        return WeightPath(write_chain(folders[0], root, versions).events, SharedDirectory(root / "cache"))
    events = {version: weight_event(version, folders[version % 2]) for version in range(versions + 1)}
    if weights == "directory":
        return WeightPath(events, SharedDirectory())
    sender = WeightSender(LOCALHOST, timeout_s=60)
    stack.callback(sender.close)
    return WeightPath(events, FromLearner(SharedDirectory()), sender)


@asynccontextmanager
async def load(engine: Engine, count: int, seen: dict[str, float]) -> AsyncIterator[None]:
    """`count` requests in flight all the time; `seen` gets when each label first arrived in a finished request."""

    async def client(number: int) -> None:
        while True:
            async for chunk in engine.generate([5] * 32, Sampling(16, ignore_eos=True), request_id=f"l{number}"):
                for span in chunk.spans:
                    seen.setdefault(span.label, time.perf_counter())

    clients = [asyncio.create_task(client(number)) for number in range(count)]
    yield
    for one in clients:
        one.cancel()
    await asyncio.gather(*clients, return_exceptions=True)


async def bare_swaps(control: EngineControl, folders: list[Path], count: int) -> list[float]:
    """Seconds of each direct swap."""
    times = []
    for number in range(count):
        start = time.perf_counter()
        await control.pause("keep")
        await control.load(folders[number % 2])
        await control.reset_prefix_cache()
        await control.set_version(make_label("bare", number))
        await control.resume()
        times.append(time.perf_counter() - start)
    return times


async def measure(
    bus: KafkaBus, control: EngineControl, engine: Engine, path: WeightPath, versions: int, count: int
) -> None:
    """Print the table."""
    times, seen = SwapTimes(control), dict[str, float]()
    rows: dict[str, list[float]] = {"checked and frozen": [], "serving": [], "first token at a client": []}
    async with load(engine, count, seen):
        await until(lambda: seen)
        bare = await bare_swaps(control, [Path(path.events[one]["uri"]) for one in range(2)], versions)
        reloader = Reloader(
            bus, control, namespace=NAMESPACE, policy=POLICY, worker="engine-0", transport=path.transport
        )
        stop, publisher = asyncio.Event(), bus.publisher()
        running = asyncio.create_task(reloader.run(stop))
        announce(bus, path.events[0], WEIGHTS)
        await until(lambda: running.done() or reloader.served == 0)
        if running.done():
            await running
        for version in range(1, versions + 1):
            await asyncio.sleep(0.3)
            record = codec.encode("WeightVersion", path.announce(version))
            written: list[float] = []
            sent = publisher.publish(Outgoing(WEIGHTS, POLICY.encode(), record))
            sent.add_done_callback(lambda _, written=written: written.append(time.perf_counter()))
            label = make_label(POLICY, version)
            await until(lambda label=label, version=version: label in seen if count else reloader.served == version)
            await until(lambda written=written: written)  # a client may have seen the label before this thread ran
            (start,) = written
            rows["checked and frozen"].append(times.frozen_at - start)
            rows["serving"].append(times.resumed_at - start)
            rows["first token at a client"].append(seen.get(label, times.resumed_at) - start)
        stop.set()
        await running
        publisher.close()
    await engine.close()
    await control.close()
    base = statistics.median(bare)
    print(f"{versions} versions, {count} requests in flight; a bare swap takes {base * 1000:.0f} ms (median)")
    for name, seconds in rows.items():
        median, worst = statistics.median(seconds), max(seconds)
        print(f"{name:24} {median * 1000:6.0f} ms median, {worst * 1000:6.0f} ms worst, ratio {median / base:.2f}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=KINDS, default="vllm")
    parser.add_argument("--weights", choices=("directory", "broadcast", "delta"), default="directory")
    parser.add_argument("--load", type=int, default=8, help="requests in flight")
    parser.add_argument("--versions", type=int, default=20)
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folders = [write_model(root / f"v{seed}", seed) for seed in range(2)]
        control = stack.enter_context(served(given.engine, folders[0], root))
        broker = stack.enter_context(Broker(root / "broker"))
        broker.start()
        bus = stack.enter_context(KafkaBus(broker.bootstrap))
        bus.ensure_topics([TopicSpec(WEIGHTS, 1), TopicSpec(WORKERS, 1, {"cleanup.policy": "compact"})])
        path = path_of(given.weights, folders, root, given.versions, stack)
        engine = client_of(given.engine, control)
        asyncio.run(measure(bus, control, engine, path, given.versions, given.load))


if __name__ == "__main__":
    main()
