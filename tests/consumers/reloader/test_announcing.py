"""What an engine's reloader says of it beside its version: its kind, its load, that it hangs, that it was told to
stop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.consumers.reloader import shell
from millrace.consumers.reloader.status import DRAIN_NOTE
from millrace.infra.engines.control import EngineLoad
from millrace.infra.log.memory.bus import MemoryBus
from millrace.infra.workers import drain_request
from millrace.schemas.records import WorkerStatus
from tests.consumers.reloader.conftest import Killed, ScriptedEngine, Start
from tests.support.announced import WORKERS, announce, statuses, weight_event
from tests.support.engines import until
from tests.support.fault_points import fault_points

KEY = b"engine-0/1/drain"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "LEAVE_S", 0.1)


def said(bus: MemoryBus) -> list[WorkerStatus]:
    """Of the engine itself, oldest first."""
    return [one for one in statuses(bus) if one is not None and one["role"] == "engine"]


def tell_to_stop(bus: MemoryBus, *, draining: bool = True, **fields: str) -> None:
    engine: Any = {**said(bus)[-1], **fields}
    with bus.publisher() as publisher:
        publisher.publish(drain_request(WORKERS, engine, draining=draining)).result(30)


async def test_it_says_what_the_engine_is_and_has_to_do(
    bus: MemoryBus, scripted: ScriptedEngine, folders: list[Path], start: Start
) -> None:
    announce(bus, weight_event(0, folders[0]))
    async with start(scripted, kind="inprocess"):
        await until(lambda: said(bus) and said(bus)[-1]["state"] == "serving")
        last = said(bus)[-1]
        assert (last["kind"], last["running"], last["draining"]) == ("inprocess", None, False)
        scripted.occupied = EngineLoad(3, 2, 0.25, 120.5)
        await until(lambda: said(bus)[-1]["running"] == 3)
        last = said(bus)[-1]
        assert (last["waiting"], last["free_cache"], last["tokens_s"]) == (2, 0.25, 120.5)


async def test_an_engine_that_is_told_to_stop_is_drained_once_it_has_no_calls(
    bus: MemoryBus, scripted: ScriptedEngine, folders: list[Path], start: Start
) -> None:
    drained: list[bool] = []
    announce(bus, weight_event(0, folders[0]))
    scripted.occupied = EngineLoad(1, 0)
    async with start(scripted, on_drain=lambda: drained.append(True)) as reloader:
        await until(lambda: reloader.served == 0 and said(bus)[-1]["state"] == "serving")
        tell_to_stop(bus, worker="engine-1")
        tell_to_stop(bus, policy="another")
        tell_to_stop(bus, incarnation="a former one")
        before = len(said(bus))
        await until(lambda: len(said(bus)) > before + 3)
        assert not any(one["draining"] for one in said(bus))
        tell_to_stop(bus)
        await until(lambda: said(bus)[-1]["draining"])
        before = len(said(bus))
        await until(lambda: len(said(bus)) > before + 4)
        assert {one["state"] for one in said(bus)[before:]} == {"serving"}, "it has a call"
        scripted.occupied = EngineLoad(0, 0)
        await until(lambda: drained)
        await until(lambda: said(bus)[-1]["state"] == "stopped")
        assert said(bus)[-1]["error"] == DRAIN_NOTE
        assert KEY in {record.key for record in bus.read(WORKERS, 0)}
        scripted.restart()  # another start of it takes calls again, and nothing of the former stays
        await until(lambda: said(bus)[-1]["state"] == "serving")
        assert (said(bus)[-1]["incarnation"], said(bus)[-1]["draining"]) == ("2", False)
        assert [record.value for record in bus.read(WORKERS, 0) if record.key == KEY][-1] is None
    assert drained == [True]


async def test_a_drained_engine_takes_calls_again_once_it_is_told_to(
    bus: MemoryBus, scripted: ScriptedEngine, folders: list[Path], start: Start
) -> None:
    announce(bus, weight_event(0, folders[0]))
    announce(bus, weight_event(1, folders[1]))
    scripted.occupied = EngineLoad(0, 0)
    async with start(scripted) as reloader:
        await until(lambda: reloader.served == 1 and said(bus)[-1]["state"] == "serving")
        tell_to_stop(bus)
        await until(lambda: said(bus)[-1]["state"] == "stopped")
        announce(bus, weight_event(2, folders[2]))
        await until(lambda: reloader.served == 2)  # it is kept on the newest version, for when it comes back
        tell_to_stop(bus, draining=False)
        await until(lambda: said(bus)[-1]["state"] == "serving")
        last = said(bus)[-1]
        assert (last["draining"], last["version"], last["error"], last["incarnation"]) == (False, 2, None, "1")
    async with start(scripted):
        before = len(said(bus))
        await until(lambda: len(said(bus)) > before + 2)
        assert not any(one["draining"] for one in said(bus)[before:]), "nor does it forget that"


@pytest.mark.parametrize("point", [name for name in fault_points("consumers") if name.startswith("drain.")])
async def test_a_drain_goes_on_where_its_reloader_was_killed(
    bus: MemoryBus,
    scripted: ScriptedEngine,
    folders: list[Path],
    start: Start,
    kill_at: Callable[[str], list[str]],
    point: str,
) -> None:
    announce(bus, weight_event(0, folders[0]))
    scripted.occupied = EngineLoad(0, 0)
    async with start(scripted):
        await until(lambda: said(bus) and said(bus)[-1]["state"] == "serving")
    tell_to_stop(bus)
    passages, ends = kill_at(point), []
    with pytest.raises(Killed):
        async with start(scripted, on_drain=lambda: ends.append(1)):
            await until(lambda: passages)
    assert not ends
    before = len(said(bus))
    async with start(scripted, on_drain=lambda: ends.append(1)):
        await until(lambda: ends)
    assert said(bus)[-1]["error"] == DRAIN_NOTE
    announcements = said(bus)[before:]
    first = next(at for at, one in enumerate(announcements) if one["draining"])
    assert all(one["draining"] for one in announcements[first:])
    assert [one["state"] for one in announcements[first:]] == sorted(one["state"] for one in announcements[first:])


async def test_a_reloader_that_starts_again_knows_of_it(
    bus: MemoryBus, scripted: ScriptedEngine, folders: list[Path], start: Start
) -> None:
    announce(bus, weight_event(0, folders[0]))
    async with start(scripted) as reloader:
        await until(lambda: reloader.served == 0 and said(bus)[-1]["state"] == "serving")
    tell_to_stop(bus)
    async with start(scripted):
        await until(lambda: said(bus)[-1]["draining"])


async def test_an_engine_that_hangs_is_said_to_be_gone_until_it_answers(
    bus: MemoryBus, scripted: ScriptedEngine, folders: list[Path], start: Start
) -> None:
    announce(bus, weight_event(0, folders[0]))
    async with start(scripted) as reloader:
        await until(lambda: reloader.served == 0 and said(bus)[-1]["state"] == "serving")
        scripted.hangs = True
        await until(lambda: said(bus)[-1]["state"] == "stopped")
        before = len(said(bus))
        await until(lambda: len(said(bus)) > before + 1)
        assert {one["state"] for one in said(bus)[before:]} == {"starting"}
        scripted.hangs = False
        await until(lambda: said(bus)[-1]["state"] == "serving")
    assert len(scripted.served) == 1, "it kept its weights"


async def test_an_engine_that_never_answered_has_no_calls_to_wait_for(scripted: ScriptedEngine, start: Start) -> None:
    drained: list[bool] = []
    scripted.dead = True
    async with start(scripted, on_drain=lambda: drained.append(True)) as reloader:
        await asyncio.sleep(0.1)
        assert not drained
        reloader.leave()
        await until(lambda: bool(drained), 10)
