"""One suite for every way that weights reach an engine, and what a broadcast does when it cannot be had."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file

from millrace.consumers.learner.version.sender import WeightSender
from millrace.consumers.reloader.broadcast import FromLearner
from millrace.consumers.reloader.transport import SharedDirectory, WeightTransport
from millrace.infra.engines.control import Broadcast
from millrace.infra.errors import EngineError, ReloadError
from millrace.infra.log.memory.bus import MemoryBus
from millrace.schemas.records import WeightVersion
from millrace.trainers.errors import CorruptCheckpoint
from millrace.trainers.weights import broadcast
from tests.consumers.reloader.chains import Chain, write_chain
from tests.consumers.reloader.conftest import ScriptedEngine, Start
from tests.support.announced import announce, statuses
from tests.support.engines import until


class ReceivingEngine(ScriptedEngine):
    """`workers` ranks; `tensors`: what rank 1 holds now, whichever way it came; `spoil` changes the hash it checks."""

    def __init__(self, workers: int = 1) -> None:
        super().__init__()
        self.workers = workers
        self.tensors: dict[str, torch.Tensor] = {}
        self.spoil = False

    async def ranks(self) -> int:
        return self.workers

    async def receive(self, offer: Broadcast) -> None:
        self._call("receive")
        assert self.paused, "received while sampling"
        digest = "0" * 64 if self.spoil else offer.digest
        joined = [
            asyncio.to_thread(
                broadcast.receive, offer.host, offer.port, rank, offer.ranks, offer.header, digest, timeout_s=60
            )
            for rank in range(1, self.workers + 1)
        ]
        try:
            found = await asyncio.gather(*joined)
        except (RuntimeError, CorruptCheckpoint) as error:
            raise EngineError(str(error)) from error
        assert all(torch.equal(each[name], tensor) for each in found for name, tensor in found[0].items())
        self.tensors, self.poisoned = found[0], False

    async def load(self, folder: Path) -> None:
        from safetensors.torch import load_file

        await super().load(folder)
        self.tensors = load_file(folder / "model.safetensors")


@dataclass
class Way:
    """A transport, its engine, and the versions that it can bring."""

    transport: WeightTransport
    engine: ReceivingEngine
    events: dict[int, WeightVersion]
    loads: Callable[[str], bool]


@pytest.fixture
def chain(folders: list[Path], tmp_path: Path) -> Chain:
    return write_chain(folders[0], tmp_path / "weights", 3)


@pytest.fixture
def sender() -> Iterator[WeightSender]:
    one = WeightSender("127.0.0.1", timeout_s=60)
    yield one
    one.close()


def offered(chain: Chain, sender: WeightSender) -> dict[int, WeightVersion]:
    for version, event in chain.events.items():
        sender.hold(version, event["digest"], chain.folder(version) / "model.safetensors")
        event["broadcast"] = sender.url
    return chain.events


@pytest.fixture(params=["directory", "deltas", "broadcast", "broadcast to two ranks"])
def way(request: pytest.FixtureRequest, chain: Chain, sender: WeightSender, tmp_path: Path) -> Way:
    for event in chain.events.values():
        event["broadcast"] = None
    match request.param:
        case "directory":
            return Way(SharedDirectory(), ReceivingEngine(), chain.events, lambda call: call.startswith("load"))
        case "deltas":
            cached = SharedDirectory(tmp_path / "cache")
            return Way(cached, ReceivingEngine(), chain.events, lambda call: call.startswith("load"))
        case "broadcast":
            ranks = 1
        case _:
            ranks = 2
    events = offered(chain, sender)
    return Way(FromLearner(SharedDirectory()), ReceivingEngine(ranks), events, lambda call: call == "receive")


def same(engine: ReceivingEngine, chain: Chain, version: int) -> bool:
    wanted = load_file(chain.folder(version) / "model.safetensors")
    found = engine.tensors
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


async def bring(way: Way, version: int) -> None:
    ready = await way.transport.prepare(way.engine, way.events[version], way.events, None)
    way.engine.paused, way.engine.label = True, "loading"
    await ready.load()
    await way.transport.on_load(version)


async def test_the_engine_holds_the_learners_bytes(way: Way, chain: Chain) -> None:
    for version in (1, 2, 3):
        await bring(way, version)
        assert same(way.engine, chain, version)
    assert len(way.engine.calls) == 3
    assert all(way.loads(call) for call in way.engine.calls)


async def test_preparing_touches_no_engine(way: Way) -> None:
    await way.transport.prepare(way.engine, way.events[3], way.events, None)
    assert not way.engine.calls


async def test_another_architecture_is_refused(way: Way) -> None:
    with pytest.raises(ReloadError, match="another architecture"):
        await way.transport.prepare(way.engine, way.events[3], way.events, {"a": ("F32", (1,))})


async def test_the_signature_is_that_of_the_tensors(way: Way) -> None:
    found = (await way.transport.prepare(way.engine, way.events[3], way.events, None)).signature
    assert found["lm_head.weight"] == ("F32", (512, 64))
    await way.transport.prepare(way.engine, way.events[3], way.events, found)


async def test_a_reloader_brings_versions(way: Way, chain: Chain, bus: MemoryBus, start: Start) -> None:
    async with start(way.engine, transport=way.transport) as reloader:
        for version in range(4):
            announce(bus, way.events[version])
            await until(lambda version=version: reloader.served == version and not way.engine.paused)
            assert same(way.engine, chain, version)
        newest = statuses(bus)[-1]
    assert newest is not None
    assert newest["error"] is None


# ---------------------------------------------------------------------------- broadcasts that cannot be had


async def test_a_learner_that_is_gone_leaves_the_directory(
    chain: Chain, sender: WeightSender, caplog: pytest.LogCaptureFixture
) -> None:
    events, engine = offered(chain, sender), ReceivingEngine()
    way = Way(FromLearner(SharedDirectory()), engine, events, lambda _: True)
    await bring(way, 3)
    assert engine.calls == ["receive"]
    events[0]["broadcast"] = None
    await bring(way, 0)
    assert "offers none" in caplog.text
    sender.close()
    await bring(way, 2)
    assert engine.calls[1:] == [f"load {chain.folder(0).name}", f"load {chain.folder(2).name}"]
    assert "does not send it" in caplog.text
    assert same(engine, chain, 2)


async def test_a_version_that_is_not_held_any_more_is_read(chain: Chain, sender: WeightSender) -> None:
    way = Way(FromLearner(SharedDirectory()), ReceivingEngine(), offered(chain, sender), lambda _: True)
    await bring(way, 0)  # four were offered, three are held
    assert way.engine.calls == [f"load {chain.folder(0).name}"]


async def test_bytes_that_are_not_the_events_are_not_loaded(
    chain: Chain, sender: WeightSender, caplog: pytest.LogCaptureFixture
) -> None:
    way = Way(FromLearner(SharedDirectory()), ReceivingEngine(), offered(chain, sender), lambda _: True)
    way.engine.spoil = True
    await bring(way, 3)
    assert way.engine.calls == ["receive", f"load {chain.folder(3).name}"]
    assert "its sha256 differs" in caplog.text
    assert same(way.engine, chain, 3)


async def test_what_was_sent_is_another_version(chain: Chain, sender: WeightSender) -> None:
    way = Way(FromLearner(SharedDirectory()), ReceivingEngine(), offered(chain, sender), lambda _: True)
    sender.hold(3, chain.events[3]["digest"], chain.folder(2) / "model.safetensors")
    await bring(way, 3)
    assert way.engine.calls == ["receive", f"load {chain.folder(3).name}"]
    assert same(way.engine, chain, 3)


async def test_an_engine_that_takes_none_reads_the_directory(
    chain: Chain, sender: WeightSender, scripted: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    events = offered(chain, sender)
    ready = await FromLearner(SharedDirectory()).prepare(scripted, events[3], events, None)
    scripted.paused, scripted.label = True, "loading"
    await ready.load()
    assert scripted.calls == [f"load {chain.folder(3).name}"]
    assert "takes no broadcasts" in caplog.text


async def test_nonsense_is_refused_by_the_sender(sender: WeightSender) -> None:
    async with httpx.AsyncClient() as client:
        assert (await client.post(f"{sender.url}/send", content=b"{")).status_code == 400
        assert (await client.post(f"{sender.url}/send", json={"version": 1})).status_code == 400
        asked = {"version": 1, "digest": "x", "ranks": 1}
        assert (await client.post(f"{sender.url}/send", json=asked)).status_code == 404
