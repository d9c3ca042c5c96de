"""A world of one policy on the in-memory log, and a stand-in for an engine whose every call can be made to fail."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.consumers.reloader import shell, status
from millrace.consumers.reloader.shell import Reloader
from millrace.infra import faults
from millrace.infra.engines.control import EngineControl, EngineLoad, EngineState, PauseMode
from millrace.infra.engines.kind import RECEIVER
from millrace.infra.errors import EngineError, EngineTimeout, EngineUnavailable
from millrace.infra.log.memory.bus import MemoryBus
from tests.consumers.reloader.reloading import Served, served_by
from tests.support.announced import NAMESPACE, POLICY, WEIGHTS, WORKERS
from tests.support.engines import LightEngine
from tests.support.tiny_model import write_model

Start = Callable[..., contextlib.AbstractAsyncContextManager[Reloader]]


class ScriptedEngine(EngineControl):
    """Keeps what was done to it. `poisoned` as vLLM: after a failed load, until a load succeeds."""

    url = "scripted:"

    def __init__(self) -> None:
        self.incarnation = "1"
        self.label = "default"
        self.paused = False
        self.folder: Path | None = None
        self.poisoned = False
        self.dead = False
        self.hangs = False
        self.occupied: EngineLoad | None = None
        self.calls: list[str] = []
        self.served: list[tuple[str, str | None]] = []
        self.bad: set[str] = set()
        self.resets: list[bool] = []
        self.refuses: str | None = None

    def restart(self) -> None:
        """Come back as a new process."""
        self.incarnation = str(int(self.incarnation) + 1)
        self.label, self.paused, self.folder, self.poisoned, self.dead = "default", False, None, False, False

    def _call(self, name: str) -> None:
        if self.dead:
            raise EngineUnavailable("it does not answer")
        self.calls.append(name)

    async def state(self) -> EngineState:
        if self.dead:
            raise EngineUnavailable("it does not answer")
        if self.hangs:
            raise EngineTimeout("it did not answer in time")
        return EngineState(self.incarnation, self.label, self.paused)

    async def occupancy(self) -> EngineLoad | None:
        return self.occupied

    async def pause(self, mode: PauseMode = "keep") -> None:
        self._call("pause")
        self.paused = True

    async def resume(self) -> None:
        self._call("resume")
        assert not self.poisoned, "a poisoned engine was resumed"
        self.paused = False
        self.served.append((self.label, self.folder.name if self.folder else None))

    async def refusal(self, folder: Path) -> str | None:
        return self.refuses

    async def load(self, folder: Path) -> None:
        self._call(f"load {folder.name}")
        assert self.paused, "loaded while sampling"
        assert self.label == "loading", "loaded under a label"
        if folder.name in self.bad:
            self.poisoned = True
            raise EngineError("the engine says 500")
        self.folder, self.poisoned = folder, False

    async def set_version(self, label: str) -> None:
        self._call(f"label {label}")
        self.label = label

    async def reset_prefix_cache(self) -> bool:
        self._call("reset")
        return self.resets.pop(0) if self.resets else True

    async def abort(self, request_ids: Sequence[str] = ()) -> int:
        self._call("abort")
        return 0

    async def close(self) -> None:
        """Nothing to close."""


@pytest.fixture
def bus() -> MemoryBus:
    return MemoryBus({WEIGHTS: 1, WORKERS: 1})


@pytest.fixture
def scripted() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Directories of seeds 0 to 2, and one of another shape."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("versions")
    same = [write_model(root / f"v{seed}", seed) for seed in range(3)]
    return [*same, write_model(root / "wide", 3, hidden=96)]


@pytest.fixture(scope="module")
def light(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LightEngine]:
    """A process of the in-process engine, on the first directory."""
    server = LightEngine(folders[0], tmp_path_factory.mktemp("light") / "log")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def receiver(folders: list[Path], tmp_path: Path) -> Iterator[LightEngine]:
    """As `light`, of one test, which may kill it; it receives broadcasts."""
    server = LightEngine(folders[0], tmp_path / "engine", ("--receiver", RECEIVER))
    server.start()
    yield server
    server.kill()


@pytest.fixture(
    params=[
        pytest.param("receiver", id="light"),
        pytest.param("vllm", marks=pytest.mark.vllm),
        pytest.param("sglang", marks=pytest.mark.sglang),
    ]
)
async def served(request: pytest.FixtureRequest, folders: list[Path]) -> AsyncIterator[Served]:
    """A server of each kind."""
    async with served_by(request.param, request.getfixturevalue(request.param), folders[0]) as one:
        yield one


@pytest.fixture
def start(bus: MemoryBus, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Run a reloader for as long as the context lasts; what it raises is raised here."""
    monkeypatch.setattr(shell, "LOOK_S", 0.02)
    monkeypatch.setattr(status, "BEAT_S", 0.05)

    @asynccontextmanager
    async def run(control: EngineControl, **options: Any) -> AsyncIterator[Reloader]:
        reloader = Reloader(bus, control, namespace=NAMESPACE, policy=POLICY, worker="engine-0", **options)
        stop = asyncio.Event()
        task = asyncio.create_task(reloader.run(stop))
        try:
            yield reloader
        finally:
            stop.set()
            await task

    return run


class Killed(BaseException):
    """Stands for kill -9 at a fault point."""


@pytest.fixture
def kill_at() -> Iterator[Callable[[str], list[str]]]:
    """Arm one fault point, once, to end the process that passes it. The list names it once that has happened."""

    def arm(wanted: str) -> list[str]:
        passed: list[str] = []

        def hook(name: str) -> None:
            if name == wanted:
                faults.install(None)
                passed.append(name)
                raise Killed(name)

        faults.install(hook)
        return passed

    yield arm
    faults.install(None)
