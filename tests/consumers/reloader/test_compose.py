"""Versions composed from deltas: what reaches the engine is the learner's own bytes, whatever is damaged or missing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.consumers.reloader.compose import clear, fetch, folders, name_of
from millrace.consumers.reloader.transport import SharedDirectory
from millrace.infra import faults
from millrace.infra.errors import ReloadError
from millrace.infra.log.memory.bus import MemoryBus
from millrace.trainers.weights import manifest
from tests.consumers.reloader.chains import Chain, write_chain
from tests.consumers.reloader.conftest import Killed, ScriptedEngine, Start
from tests.support.announced import announce, statuses
from tests.support.engines import until


@pytest.fixture
def chain(folders: list[Path], tmp_path: Path) -> Chain:
    """Versions 0 to 5, of which 0 and 3 are whole."""
    return write_chain(folders[0], tmp_path / "weights", 5, every=3)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def served(chain: Chain, version: int, cache: Path | None) -> Path:
    """The folder of `version`, its weights compared with the event's hash."""
    event = chain.events[version]
    folder, found = fetch(event, chain.events, cache, None)
    assert manifest.file_hash(folder / "model.safetensors") == event["files"]["model.safetensors"]
    assert found["lm_head.weight"] == ("F32", (512, 64))
    assert fetch(event, chain.events, cache, found)[1] == found
    return folder


def test_a_delta_is_all_that_is_read_by_who_has_the_parent(chain: Chain, cache: Path) -> None:
    served(chain, 1, cache)
    for version in (0, 1):
        shutil.rmtree(chain.folder(version))
    chain.delta(1).unlink()
    chain.hide(2)
    assert served(chain, 2, cache) == cache / name_of(chain.events[2])


def test_a_late_reader_skips_versions(chain: Chain, cache: Path) -> None:
    served(chain, 1, cache)
    assert served(chain, 5, cache).parent == cache
    assert [path.name for path in folders(cache)] == [name_of(chain.events[1]), name_of(chain.events[5])]


def test_a_new_reader_begins_at_the_anchor(chain: Chain, cache: Path) -> None:
    for version in (1, 2, 4, 5):
        chain.hide(version)
    for version in (1, 2):
        chain.delta(version).unlink()
    assert served(chain, 5, cache).parent == cache


def test_whole_versions_and_readers_without_a_cache_read_directories(chain: Chain, cache: Path) -> None:
    assert served(chain, 3, cache) == chain.folder(3)
    assert served(chain, 5, None) == chain.folder(5)
    assert not cache.exists()


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Chain, Path], object]] = {
    "flipped": lambda chain, _: _flip(chain.delta(5)),
    "cut": lambda chain, _: chain.delta(5).write_bytes(chain.delta(5).read_bytes()[:-9]),
    "gone": lambda chain, _: chain.delta(4).unlink(),
    "anchor": lambda chain, _: _flip(chain.folder(3) / "model.safetensors"),
    "no parent": lambda chain, _: chain.events.pop(4),
    "no room": lambda _, cache: cache.write_text("a file where a directory belongs"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_cannot_be_composed_is_read_whole_and_said(
    chain: Chain, cache: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    DAMAGE[name](chain, cache)
    assert served(chain, 5, cache) == chain.folder(5)
    assert "version 5 cannot be composed" in caplog.text
    assert "version 5 is read whole" in caplog.text
    assert not folders(cache)
    chain.hide(5)
    with pytest.raises(ReloadError):
        fetch(chain.events[5], chain.events, cache, None)


def test_a_damaged_base_is_given_up_for_the_anchor(chain: Chain, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    _flip(served(chain, 4, cache) / "model.safetensors")
    assert served(chain, 5, cache).parent == cache
    assert "version 5 cannot be composed" in caplog.text
    assert "read whole" not in caplog.text


def test_what_is_there_is_checked_and_made_again_when_damaged(chain: Chain, cache: Path) -> None:
    folder = served(chain, 4, cache)
    inode = folder.stat().st_ino
    assert served(chain, 4, cache).stat().st_ino == inode
    (folder / "config.json").unlink()
    assert served(chain, 4, cache) == folder


def test_little_is_kept(chain: Chain, cache: Path) -> None:
    for version in (1, 2, 4, 5):
        served(chain, version, cache)
    (cache / ".tmp-v6-x-y").mkdir()
    clear(cache, keep=2)
    assert sorted(path.name for path in cache.iterdir()) == [name_of(chain.events[n]) for n in (4, 5)]
    clear(cache)
    assert not list(cache.iterdir())


@pytest.mark.parametrize("point", ["reload.before_rename", "reload.after_rename"])
async def test_killed_while_composing(
    bus: MemoryBus, scripted: ScriptedEngine, chain: Chain, cache: Path, start: Start, point: str
) -> None:
    passed: list[str] = []

    def hook(name: str) -> None:
        if name == point:
            faults.install(None)
            passed.append(name)
            raise Killed(name)

    faults.install(hook)
    options: dict[str, Any] = {"transport": SharedDirectory(cache)}
    for version in (0, 1, 2):
        announce(bus, chain.events[version])
    try:
        with pytest.raises(Killed):
            async with start(scripted, **options):
                await until(lambda: passed)
    finally:
        faults.install(None)
    assert not scripted.calls, "the engine was not touched"
    async with start(scripted, **options) as reloader:
        await until(lambda: reloader.served == 2)
    assert f"load {name_of(chain.events[2])}" in scripted.calls
    assert not list(cache.glob(".tmp-*"))


async def test_an_engine_follows_a_chain(
    bus: MemoryBus, scripted: ScriptedEngine, chain: Chain, cache: Path, start: Start
) -> None:
    options: dict[str, Any] = {"transport": SharedDirectory(cache)}
    async with start(scripted, **options) as reloader:
        for version in range(6):
            announce(bus, chain.events[version])
            await until(lambda version=version: reloader.served == version)
        assert scripted.folder == cache / name_of(chain.events[5])
        newest = statuses(bus)[-1]
    assert newest is not None
    assert newest["error"] is None
    assert len(folders(cache)) == 2
