"""Claims: stored once, checked on the way back, never outside their root."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from millrace.infra import durable, faults
from millrace.infra.errors import ClaimError
from millrace.infra.log.base import Record
from millrace.infra.log.blobs import ClaimStore
from millrace.schemas import codec
from tests.support.fault_points import fault_points

POINTS = [name for name in fault_points("infra") if name.startswith("claims.")]
STORE = (
    "import sys; from millrace.infra.log.blobs import ClaimStore;ClaimStore(sys.argv[1]).store('Event', b'data' * 1000)"
)
LATER = time.time() + 1e6
"""later than any run of these tests takes"""


def record(value: bytes | None) -> Record:
    return Record("t", 0, 0, b"", value, {}, 0)


@pytest.fixture(params=["", "file://", "memory://"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ClaimStore:
    return ClaimStore(f"{request.param}{tmp_path}")


def test_bytes_come_back(store: ClaimStore) -> None:
    claim = store.store("Event", b"data")
    assert (claim["size"], claim["name"]) == (4, "Event")
    assert store.load(claim) == b"data"
    assert store.store("Event", b"data") == claim
    assert store.resolve(record(codec.encode("Claim", claim))).value == b"data"


def test_other_records_resolve_to_themselves(store: ClaimStore) -> None:
    progress = record(codec.encode("Progress", {"stage": "s", "slot": 0, "time": 0}))
    assert store.resolve(progress) is progress
    assert store.resolve(record(None)).value is None


def test_storage_that_is_not_installed_is_said() -> None:
    with pytest.raises(ClaimError, match=r"nosuch://x/y cannot be reached: .*not known.*`objects`"):
        ClaimStore("nosuch://x/y")


def test_stored_once(tmp_path: Path) -> None:
    store = ClaimStore(str(tmp_path))
    store.store("Event", b"data")
    store.store("Event", b"data")
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1


def test_two_processes_of_one_number_do_not_share_a_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In containers both may be process 1. One dies over its draft, or another is in the middle of its own."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    one, other = ClaimStore(str(tmp_path)), ClaimStore(str(tmp_path))
    meanwhile = list[bytes]()

    def hook(name: str) -> None:
        if name == "claims.before_rename" and not meanwhile:
            meanwhile.append(b"")
            claim = other.store("Event", b"data")
            meanwhile.append(other.load(claim))

    before = faults.install(hook)
    try:
        claim = one.store("Event", b"data")
    finally:
        faults.install(before)
    assert meanwhile[1:] == [one.load(claim)] == [b"data"]
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1


def test_a_claim_that_another_process_stored_is_on_the_disk_before_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been killed between the rename and the flush of the folder."""
    claim = ClaimStore(str(tmp_path)).store("Event", b"data")
    folder = Path(claim["uri"].removeprefix("file://")).parent
    flushed: set[int] = set()
    fsync = os.fsync

    def synced(handle: int) -> None:
        flushed.add(os.fstat(handle).st_ino)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", synced)
    assert ClaimStore(str(tmp_path)).store("Event", b"data") == claim
    assert {folder.stat().st_ino, tmp_path.stat().st_ino} <= flushed


def test_a_torn_write_is_written_again(tmp_path: Path) -> None:
    store = ClaimStore(str(tmp_path))
    claim = store.store("Event", b"data")
    Path(claim["uri"].removeprefix("file://")).write_bytes(b"da")
    with pytest.raises(ClaimError, match="other bytes"):
        store.load(claim)
    assert store.load(store.store("Event", b"data")) == b"data"


def test_changed_missing_and_foreign_bytes_are_refused(tmp_path: Path) -> None:
    store = ClaimStore(str(tmp_path / "root"))
    claim = store.store("Event", b"data")
    path = Path(claim["uri"].removeprefix("file://"))
    path.write_bytes(b"atad")
    with pytest.raises(ClaimError, match="other bytes"):
        store.load(claim)
    path.unlink()
    with pytest.raises(ClaimError, match="cannot be read"):
        store.load(claim)
    (tmp_path / "secret").write_bytes(b"data")
    for uri in (f"file://{tmp_path}/secret", "/etc/passwd", "http://127.0.0.1/x", f"file://{tmp_path}/root/../secret"):
        with pytest.raises(ClaimError, match="not in this store"):
            store.load({**claim, "uri": uri})
    outside = f"../../{tmp_path.name}/secret"
    with pytest.raises(ClaimError, match="not in this store"):
        store.load({**claim, "sha256": outside, "uri": f"file://{tmp_path}/root/../{outside}"})


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_any_point_leaves_nothing_half_claimed(point: str, tmp_path: Path) -> None:
    """Three times in a row, as a process that is started again meets it; what is left over goes by itself."""
    for _ in range(3):
        environment = {**os.environ, "MILLRACE_KILL": point}
        done = subprocess.run([sys.executable, "-c", STORE, str(tmp_path)], env=environment, timeout=120)
        assert done.returncode in (-signal.SIGKILL, 0), "0: an earlier one had stored it"
        for path in tmp_path.rglob("*"):
            assert path.is_dir() or durable.final_name(path.name) or path.read_bytes() == b"data" * 1000
    store = ClaimStore(str(tmp_path))
    claim = store.store("Event", b"data" * 1000)
    assert list(store.older(LATER)) == [claim["sha256"]]
    assert store.load(claim) == b"data" * 1000
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1


def test_what_is_old_can_be_removed(store: ClaimStore) -> None:
    claim = store.store("Event", b"old data")
    assert list(store.older(time.time() - 3600)) == []
    assert store.remove(claim["sha256"], time.time() - 3600) == 0
    assert store.load(claim) == b"old data"
    assert list(store.older(LATER)) == [claim["sha256"]]
    assert store.remove(claim["sha256"], LATER) == 8
    assert store.remove(claim["sha256"], LATER) == 0
    assert list(store.older(LATER)) == []
    with pytest.raises(ClaimError, match="cannot be read"):
        store.load(claim)
    assert store.load(store.store("Event", b"old data")) == b"old data"


def test_what_is_stored_again_is_new(tmp_path: Path) -> None:
    store = ClaimStore(str(tmp_path))
    claim = store.store("Event", b"data")
    os.utime(Path(claim["uri"].removeprefix("file://")), (0, 0))
    assert list(store.older(1000)) == [claim["sha256"]]
    store.store("Event", b"data")
    assert list(store.older(1000)) == []
    assert store.remove(claim["sha256"], 1000) == 0
    assert store.load(claim) == b"data"


def test_a_removal_that_was_killed_half_way_is_undone(tmp_path: Path) -> None:
    store = ClaimStore(str(tmp_path))
    claim = store.store("Event", b"data")
    path = Path(claim["uri"].removeprefix("file://"))
    path.rename(path.with_name(f"{path.name}.4711.gone"))
    list(store.older(LATER))
    assert store.load(claim) == b"data"
    path.with_name(f"{path.name}.4711.gone").write_bytes(b"data")
    list(store.older(LATER))
    assert [file.name for file in path.parent.iterdir()] == [claim["sha256"]]
