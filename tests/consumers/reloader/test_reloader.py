"""The reloader on the in-memory log: a scripted engine for every failure, the in-process engine for the numbers."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from millrace.infra.engines.base import Sampling
from millrace.infra.engines.control import EngineState
from millrace.infra.engines.inprocess import engine as inprocess
from millrace.infra.engines.inprocess.engine import InprocessEngine
from millrace.infra.errors import EngineError, UnreachableError
from millrace.infra.log.base import Outgoing, Record
from millrace.infra.log.history.reader import History
from millrace.infra.log.memory.bus import MemoryBus
from tests.consumers.reloader.conftest import Killed, ScriptedEngine, Start
from tests.support.announced import WORKERS, announce, damaged, statuses, weight_event
from tests.support.engines import DirectControl, complete, differences, join, until
from tests.support.fault_points import fault_points

SWAP = ["pause", "label loading", "load v0", "reset", "label policy@0", "resume"]
PROMPT = [22, 10, 14, 40]


async def test_a_swap_has_one_order_and_is_acknowledged_before_it_resumes(
    bus: MemoryBus, scripted: ScriptedEngine, folders: list[Path], start: Start
) -> None:
    said: list[str | None] = []
    resume = scripted.resume

    async def spy() -> None:
        said.extend(status and status["state"] for status in statuses(bus))
        await resume()

    scripted.resume = spy
    announce(bus, weight_event(0, folders[0]))
    async with start(scripted) as reloader:
        await until(lambda: reloader.served == 0 and not scripted.paused)
    assert scripted.calls == SWAP
    assert said[-1] == "loaded"
    last = [status for status in statuses(bus) if status is not None]
    loaded = next(status for status in last if status["state"] == "loaded")
    assert (loaded["incarnation"], loaded["version"], loaded["label"]) == ("1", 0, "policy@0")
    assert loaded["expires_at"] > loaded["time"]


async def test_an_acknowledgement_stands_until_it_serves(
    bus: MemoryBus, scripted: ScriptedEngine, folders: list[Path], start: Start
) -> None:
    """However long the engine takes to go on: who reads the log then may ask it already."""
    resume = scripted.resume

    async def slow() -> None:
        before = len(statuses(bus))
        await until(lambda: len(statuses(bus)) > before + 2)
        await resume()

    scripted.resume = slow
    announce(bus, weight_event(0, folders[0]))
    async with start(scripted) as reloader:
        await until(lambda: reloader.served == 0 and not scripted.paused)
    said = [status["state"] for status in statuses(bus) if status is not None]
    assert set(said[said.index("loaded") :]) <= {"loaded", "serving"}


async def test_it_takes_the_newest_of_many_and_renews_its_status(
    bus: MemoryBus, scripted: ScriptedEngine, folders: list[Path], start: Start
) -> None:
    for version in range(3):
        announce(bus, weight_event(version, folders[version]))
    async with start(scripted) as reloader:
        await until(lambda: reloader.served == 2 and not scripted.paused)
        before = len(statuses(bus))
        await until(lambda: len(statuses(bus)) > before + 2)
        newest = statuses(bus)[-1]
        assert newest is not None
        assert (newest["state"], newest["version"]) == ("serving", 2)
        announce(bus, weight_event(3, folders[0]))
        await until(lambda: reloader.served == 3)
    assert [call for call in scripted.calls if call.startswith("load")] == ["load v2", "load v0"]


async def test_a_bad_directory_never_reaches_the_engine(
    bus: MemoryBus, scripted: ScriptedEngine, folders: list[Path], start: Start, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(folders[1], tmp_path / "copy"))
    event = weight_event(1, copy)
    (copy / "model.safetensors").write_bytes(b"torn")
    announce(bus, weight_event(0, folders[0]))
    async with start(scripted) as reloader:
        await until(lambda: reloader.served == 0)
        announce(bus, event)
        announce(bus, weight_event(2, folders[3]))
        await until(lambda: any(s is not None and s["error"] and "another arch" in s["error"] for s in statuses(bus)))
        assert not scripted.paused
        newest = statuses(bus)[-1]
        assert newest is not None
        assert (newest["state"], newest["version"]) == ("serving", 0)
    assert scripted.calls == SWAP


async def test_what_the_engine_must_not_be_given_never_reaches_it(
    bus: MemoryBus, scripted: ScriptedEngine, folders: list[Path], start: Start
) -> None:
    scripted.refuses = "its embeddings are tied"
    announce(bus, weight_event(0, folders[0]))
    async with start(scripted):
        reason = "version 0: its embeddings are tied"
        await until(lambda: reason in [status and status["error"] for status in statuses(bus)])
    assert scripted.calls == []


async def test_a_failed_load_is_followed_by_the_last_good_one(
    bus: MemoryBus, scripted: ScriptedEngine, folders: list[Path], start: Start
) -> None:
    announce(bus, weight_event(0, folders[0]))
    async with start(scripted) as reloader:
        await until(lambda: reloader.served == 0)
        scripted.bad.add("v1")
        announce(bus, weight_event(1, folders[1]))
        await until(lambda: len(scripted.served) == 2)
        assert scripted.served == [("policy@0", "v0"), ("policy@0", "v0")]
        assert "failed" in [status and status["state"] for status in statuses(bus)]
        announce(bus, weight_event(2, folders[2]))
        await until(lambda: reloader.served == 2)
    assert scripted.served[-1] == ("policy@2", "v2")


async def test_two_failed_loads_end_the_engine_and_the_next_incarnation_is_loaded(
    bus: MemoryBus, scripted: ScriptedEngine, folders: list[Path], start: Start
) -> None:
    announce(bus, weight_event(0, folders[0]))
    ended: list[str] = []

    def restart() -> int:
        ended.append(scripted.incarnation)
        scripted.bad.clear()
        scripted.restart()
        return 1

    async with start(scripted, restart=restart) as reloader:
        await until(lambda: reloader.served == 0)
        scripted.bad |= {"v0", "v1"}
        announce(bus, weight_event(1, folders[1]))
        await until(lambda: reloader.served == 1 and not scripted.paused)
    assert ended == ["1"]
    assert scripted.served == [("policy@0", "v0"), ("policy@1", "v1")]
    assert None in statuses(bus)


async def test_an_engine_nobody_can_restart_stays_paused(
    bus: MemoryBus, scripted: ScriptedEngine, folders: list[Path], start: Start
) -> None:
    scripted.bad |= {"v0", "v1"}
    announce(bus, weight_event(0, folders[0]))
    announce(bus, weight_event(1, folders[1]))
    async with start(scripted):
        await until(lambda: len([call for call in scripted.calls if call.startswith("load")]) == 2)
        announce(bus, weight_event(2, folders[2]))
        await until(lambda: len(statuses(bus)) > 12)
        assert scripted.paused
        newest = statuses(bus)[-1]
        assert newest is not None
        assert (newest["state"], newest["version"]) == ("failed", None)
    assert "load v2" not in scripted.calls


async def test_a_restarted_engine_is_loaded_again_and_the_old_incarnation_withdrawn(
    bus: MemoryBus, scripted: ScriptedEngine, folders: list[Path], start: Start
) -> None:
    announce(bus, weight_event(0, folders[0]))
    async with start(scripted) as reloader:
        await until(lambda: reloader.served == 0 and not scripted.paused)
        scripted.dead = True
        await until(lambda: any(s is not None and s["state"] == "stopped" for s in statuses(bus)))
        quiet = len(statuses(bus))
        await asyncio.sleep(0.2)
        said = [status for status in statuses(bus)[quiet:] if status is not None]
        assert {(status["state"], status["version"]) for status in said} == {("starting", None)}, "it may be loading"
        assert all("does not answer" in status["error"] for status in said)
        scripted.restart()
        await until(lambda: len(scripted.served) == 2)
    assert _standing_keys(bus) == {b"engine-0/2"}


async def test_a_log_that_is_silent_as_an_engine_restarts_ends_no_reloader(
    bus: MemoryBus, scripted: ScriptedEngine, folders: list[Path], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`engine join` would end its engine with it."""
    announce(bus, weight_event(0, folders[0]))
    async with start(scripted) as reloader:
        await until(lambda: reloader.served == 0)
        looks, read = [], History.newest_by_key

        def newest(self: History, kind: str) -> dict[bytes, Record]:
            looks.append(kind)
            if len(looks) < 3:
                raise UnreachableError("the broker did not answer")
            return read(self, kind)

        monkeypatch.setattr(History, "newest_by_key", newest)
        scripted.restart()
        await until(lambda: len(looks) == 3 and reloader.served == 0)
        await until(lambda: _standing_keys(bus) == {b"engine-0/2"})
    assert looks == ["workers"] * 3


async def test_a_start_in_mid_swap_is_not_labelled_by_what_another_loaded(
    bus: MemoryBus, scripted: ScriptedEngine, folders: list[Path], start: Start
) -> None:
    reset, set_version = scripted.reset_prefix_cache, scripted.set_version
    labels: list[tuple[str, Path | None]] = []

    async def end_once() -> bool:
        if scripted.incarnation == "1":
            scripted.restart()
        return await reset()

    async def spy(label: str) -> None:
        labels.append((label, scripted.folder))
        await set_version(label)

    scripted.reset_prefix_cache, scripted.set_version = end_once, spy
    announce(bus, weight_event(0, folders[0]))
    async with start(scripted) as reloader:
        await until(lambda: reloader.served == 0 and not scripted.paused)
    assert [folder for label, folder in labels if label == "policy@0"] == [folders[0]]


async def test_an_engine_that_still_loads_is_said_to_start(
    bus: MemoryBus, scripted: ScriptedEngine, folders: list[Path], start: Start
) -> None:
    announce(bus, weight_event(0, folders[0]))
    scripted.dead = True
    async with start(scripted) as reloader:
        await until(lambda: [s["state"] for s in statuses(bus) if s is not None] == ["starting"] * 2)
        scripted.dead = False
        await until(lambda: reloader.served == 0)
    assert _standing_keys(bus) == {b"engine-0/1"}


async def test_a_fresh_reloader_withdraws_former_incarnations_of_its_engine_alone(
    bus: MemoryBus, scripted: ScriptedEngine, folders: list[Path], start: Start
) -> None:
    announce(bus, weight_event(0, folders[0]))
    publisher = bus.publisher()
    publisher.publish(Outgoing(WORKERS, b"engine-1/7", b"another's")).result()
    async with start(scripted) as reloader:
        await until(lambda: reloader.served == 0)
    scripted.restart()
    async with start(scripted) as reloader:
        await until(lambda: reloader.served == 0)
    assert _standing_keys(bus) == {b"engine-0/2", b"engine-1/7"}


def _standing_keys(bus: MemoryBus) -> set[bytes]:
    last = {record.key: record.value for record in bus.read(WORKERS, 0)}
    return {key for key, value in last.items() if value is not None}


async def test_a_reset_that_does_not_happen_is_insisted_on(
    bus: MemoryBus, scripted: ScriptedEngine, folders: list[Path], start: Start
) -> None:
    scripted.resets = [False, False]
    announce(bus, weight_event(0, folders[0]))
    async with start(scripted) as reloader:
        await until(lambda: reloader.served == 0)
        assert scripted.calls.count("reset") == 3
        scripted.resets = [False] * 5
        announce(bus, weight_event(1, folders[1]))
        await until(lambda: reloader.served == 1)
        assert scripted.calls.count("abort") == 1


async def test_a_cache_that_is_never_reset_is_a_failed_load(
    bus: MemoryBus, scripted: ScriptedEngine, folders: list[Path], start: Start
) -> None:
    announce(bus, weight_event(0, folders[0]))
    async with start(scripted) as reloader:
        await until(lambda: reloader.served == 0)
        scripted.resets = [False] * 10
        announce(bus, weight_event(1, folders[1]))
        await until(lambda: len(scripted.served) == 2)
    assert scripted.served[1] == ("policy@0", "v0")


async def test_a_pause_that_fails_does_not_condemn(
    bus: MemoryBus, scripted: ScriptedEngine, folders: list[Path], start: Start
) -> None:
    pause, left = scripted.pause, 4

    async def flaky(mode: str = "keep") -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            raise EngineError("busy")
        await pause()

    scripted.pause = flaky
    announce(bus, weight_event(0, folders[0]))
    async with start(scripted) as reloader:
        await until(lambda: reloader.served == 0)
    assert left < 0


POINTS = [point for point in fault_points("consumers") if point.startswith("reloader.")]


def test_the_points_are_known() -> None:
    assert len(POINTS) == 8


@pytest.mark.parametrize("point", POINTS)
async def test_killed_anywhere_the_next_one_finishes(
    bus: MemoryBus,
    scripted: ScriptedEngine,
    folders: list[Path],
    start: Start,
    kill_at: Callable[[str], list[str]],
    point: str,
) -> None:
    announce(bus, weight_event(0, folders[0]))
    async with start(scripted) as reloader:
        await until(lambda: reloader.served == 0)
    killed = kill_at(point)
    announce(bus, weight_event(1, folders[1]))
    with pytest.raises(Killed):
        async with start(scripted):
            await until(lambda: killed)
    announce(bus, weight_event(2, folders[2]))
    async with start(scripted) as reloader:
        await until(lambda: reloader.served == 2 and not scripted.paused)
    assert scripted.served[-1] == ("policy@2", "v2")
    assert scripted.label == "policy@2"


@pytest.mark.slow
async def test_tokens_follow_the_versions_through_swaps_in_mid_generation(
    bus: MemoryBus, folders: list[Path], start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real engine: a request lives through a good swap and a failed one; every token is of the version it names.
    Past half its length it is sampled slowly until the first swap is over."""
    draw = inprocess.draw

    def paced(logits: Any, rows: Any, shared: Any) -> Any:
        if reloader.served != 1 and any(len(row.output) > 450 for row in rows):
            time.sleep(0.1)
        return draw(logits, rows, shared)

    engine = InprocessEngine(folders[0], seed=0)
    odd = Path(shutil.copytree(folders[1], tmp_path / "odd"))
    announce(bus, weight_event(0, folders[0]))
    async with start(DirectControl(engine)) as reloader:
        await until(lambda: reloader.served == 0)
        monkeypatch.setattr(inprocess, "draw", paced)
        async with aclosing(engine.generate(PROMPT, Sampling(900, ignore_eos=True), request_id="r")) as chunks:
            parts = [await anext(chunks) for _ in range(30)]
            announce(bus, weight_event(1, folders[1]))
            await until(lambda: reloader.served == 1)
            event = damaged(weight_event(2, odd), odd)
            load = engine.load

            async def vanish(folder: str | Path) -> None:
                if Path(folder) == odd:
                    shutil.rmtree(odd)
                await load(folder)

            engine.load = vanish
            announce(bus, event)
            parts += [chunk async for chunk in chunks]
        await until(lambda: not odd.exists() and reloader.served == 1 and not engine.paused)
    whole = join(parts)
    assert [span.label for span in whole.spans][:2] == ["policy@0", "policy@1"]
    assert {span.label for span in whole.spans} == {"policy@0", "policy@1"}
    cut = whole.spans[1].start
    assert max(differences(folders[0], PROMPT, whole.token_ids, whole.logprobs)[:cut]) < 2e-5
    assert max(differences(folders[1], PROMPT, whole.token_ids, whole.logprobs)[cut:]) < 2e-5
    (fresh,) = await complete(engine, PROMPT, Sampling(20, ignore_eos=True))
    assert max(differences(folders[1], PROMPT, fresh.token_ids, fresh.logprobs)) < 1e-5
    assert await DirectControl(engine).state() == EngineState("1", "policy@1", False)
    await engine.close()
