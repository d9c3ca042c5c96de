"""A directory of tables: who holds it, how much memory it takes, whose engine wrote it, and a disk that is full."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import chdb
import pytest

from millrace.consumers.warehouse.ingest.ingest import Ingest
from millrace.consumers.warehouse.store.directory import TableDirectory
from millrace.consumers.warehouse.store.lock import holder
from millrace.consumers.warehouse.store.migrations import migrate
from millrace.infra.errors import WarehouseError, WarehouseHeld
from tests.support.history_log import NS
from tests.support.warehouse import differing, digests, take_in, world

PATIENCE_S = 120
HOLD = """
import sys, time
from pathlib import Path
from millrace.consumers.warehouse.store.directory import TableDirectory
with TableDirectory(Path(sys.argv[1]), memory_mb=512, url="http://127.0.0.1:1"):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_a_second_process_learns_who_holds_a_directory(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        assert holder(tmp_path) == (process.pid, "http://127.0.0.1:1")
        with pytest.raises(WarehouseHeld) as raised:
            TableDirectory(tmp_path)
        assert (raised.value.pid, raised.value.url) == (process.pid, "http://127.0.0.1:1")
        assert str(tmp_path) in str(raised.value)
        assert str(process.pid) in str(raised.value)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert holder(tmp_path) is None
        (tmp_path / "tmp" / "left-over.native").write_bytes(b"a trajectory")
        with TableDirectory(tmp_path, memory_mb=512):
            assert not (tmp_path / "tmp" / "left-over.native").exists()
            assert holder(tmp_path) == (os.getpid(), "")
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_a_home_that_cannot_be_used_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WarehouseError, match=r"\[warehouse\] home"):
        TableDirectory(tmp_path / "file")


def test_memory_is_limited_by_the_settings(tmp_path: Path) -> None:
    with TableDirectory(tmp_path / "w", memory_mb=300) as store:
        found = store.rows("SELECT value FROM system.server_settings WHERE name = 'max_server_memory_usage'")
        assert found == [(str(300 << 20),)]
        with pytest.raises(WarehouseError) as raised:
            store.rows("SELECT groupArray(repeat('x', 1000)) FROM numbers(1000000)")
        assert raised.value.code == 241


def test_tables_of_a_newer_engine_are_refused_and_left_alone(tmp_path: Path) -> None:
    with TableDirectory(tmp_path, memory_mb=300) as store:
        store.run("CREATE TABLE millrace_log.t (a UInt8) ENGINE = MergeTree ORDER BY a")
    before = sorted(tmp_path.rglob("*"))
    assert (tmp_path / "engine").read_text() == chdb.engine_version
    (tmp_path / "engine").write_text("1000.1.2.3")
    with pytest.raises(WarehouseError, match=r"ClickHouse 1000\.1\.2\.3.*upgrade chdb-core"):
        TableDirectory(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / "engine").write_text("1.1")
    with TableDirectory(tmp_path, memory_mb=300) as store:
        assert store.rows("SELECT count() FROM t") == [(0,)]
    assert (tmp_path / "engine").read_text() == chdb.engine_version


# -- a full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 MB; the test is skipped where none may be mounted."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(place)], capture_output=True).returncode:
        pytest.skip("only root may mount a disk")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path) -> None:
    """Leave no room on a disk."""
    with (place / "filler").open("wb", buffering=0) as file:
        try:
            while file.write(b"\0" * 4096):
                pass
        except OSError:
            return


def wait(until: Callable[[], bool], otherwise: Callable[[], object]) -> None:
    """Until it is so."""
    deadline = time.monotonic() + PATIENCE_S
    while not until():
        assert time.monotonic() < deadline, otherwise()
        time.sleep(0.05)


@pytest.mark.slow
def test_ingest_waits_on_a_full_disk_and_goes_on_by_itself(tmp_path: Path, small_disk: Path) -> None:
    made = world(3, versions=2)
    clean = take_in(made.bus, tmp_path / "clean")
    wanted = sum(count for name, (count, _) in clean.items() if name != "unreadable")
    over = threading.Event()
    with TableDirectory(small_disk / "w", memory_mb=512) as store:
        migrate(store)
        ingest = Ingest(made.bus, store, NS, lambda data: data)
        fill(small_disk)
        thread = threading.Thread(target=ingest.follow, args=(over,))
        thread.start()
        try:
            wait(lambda: "disk is full: make room" in ingest.trouble, lambda: ingest.trouble)
            assert ingest.rows < wanted
            assert thread.is_alive()
            (small_disk / "filler").unlink()
            wait(lambda: ingest.rows == wanted, lambda: ingest.trouble)
        finally:
            over.set()
            thread.join()
        assert differing(clean, digests(store)) == []


@pytest.mark.slow
def test_a_directory_on_a_full_disk_opens_once_there_is_room(small_disk: Path) -> None:
    made = world(3, versions=1)
    before = take_in(made.bus, small_disk / "w")
    fill(small_disk)
    there = tempfile.tempdir
    with pytest.raises((WarehouseError, OSError), match=r"disk is full|No space left"):
        TableDirectory(small_disk / "w", memory_mb=512)
    assert tempfile.tempdir == there, "temporary files of others go where they went"
    (small_disk / "filler").unlink()
    assert differing(before, take_in(made.bus, small_disk / "w")) == []
