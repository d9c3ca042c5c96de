"""The capture log: crashes, full disks, restarts, retention."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from millrace.infra.errors import GatewayError
from millrace.producers.capture.entry import BULK, Entry, encode
from millrace.producers.capture.log import CaptureLog, LogFull
from millrace.producers.capture.segments import frame, segments
from tests.support.fault_points import fault_points


def entry(number: int, size: int = 10) -> Entry:
    return Entry("tenant/group", {"id": str(number)}, bytes([number % 256]) * size)


def numbers(log: CaptureLog, start: int = 0) -> list[int]:
    return [int(kept.entry.headers["id"]) for kept in log.read(start)]


class Disk:
    """A disk of `capacity` bytes for what goes through `write`; a shrunken reserve gives its bytes back."""

    def __init__(self, capacity: int) -> None:
        self.left = capacity

    def write(self, descriptor: int, data: bytes) -> int:
        if self.left == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = os.write(descriptor, data[: self.left])
        self.left -= done
        return done


def test_entries_come_back_in_order_and_survive_reopening(tmp_path: Path):
    log = CaptureLog(tmp_path / "log", segment_bytes=300)
    assert [log.append(entry(n)) for n in range(20)] == list(range(20))
    assert numbers(log) == list(range(20))
    assert len(segments(log.folder)) > 2
    source = log.source
    log.close()
    log = CaptureLog(tmp_path / "log", segment_bytes=300)
    assert (log.end, log.source) == (20, source)
    assert log.append(entry(20)) == 20
    assert numbers(log, 7) == list(range(7, 21))


@pytest.mark.parametrize("size", [BULK - 1, BULK, 3 * BULK])
def test_a_long_event_is_kept_as_any_other(tmp_path: Path, size: int):
    log = CaptureLog(tmp_path / "log")
    given = [entry(0), entry(1, size), entry(2)]
    for each in given:
        log.append(each)
    log.close()
    (segment,) = segments(log.folder)
    assert segment.path.read_bytes() == b"".join(frame(encode(each)) for each in given)
    log = CaptureLog(tmp_path / "log")
    assert [kept.entry for kept in log.read()] == given
    assert sum(kept.size for kept in log.read()) == log.waiting == segment.path.stat().st_size


@pytest.mark.parametrize("written", [0, 1])
def test_a_long_event_that_breaks_off_leaves_no_trace(tmp_path: Path, written: int):
    calls: list[int] = []

    def torn(descriptor: int, data: bytes) -> int:
        calls.append(len(data))
        if len(calls) == 2 + written:
            os.write(descriptor, data[: len(data) // 2])
            raise OSError(errno.EIO, "Input/output error")
        return os.write(descriptor, data)

    log = CaptureLog(tmp_path / "log", write=torn)
    log.append(entry(0))
    with pytest.raises(LogFull):
        log.append(entry(1, 2 * BULK))
    log.append(entry(2, 2 * BULK))
    assert numbers(log) == [0, 2]
    log.close()
    assert CaptureLog(tmp_path / "log").torn == 0


def test_a_cursor_follows_what_is_appended_over_many_files(tmp_path: Path):
    log = CaptureLog(tmp_path / "log", segment_bytes=200)
    cursor = log.cursor(0)
    seen: list[int] = []
    for n in range(50):
        log.append(entry(n))
        if n % 7 == 0:
            seen += [kept.seq for kept in cursor.take(3)]
    while found := cursor.take(100):
        seen += [kept.seq for kept in found]
    assert seen == list(range(50))
    assert cursor.take(1) == []


def test_permissions_are_private(tmp_path: Path):
    log = CaptureLog(tmp_path / "log")
    log.append(entry(0))
    log.release(1, 10)
    assert stat.S_IMODE(log.folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in log.folder.iterdir()} == {0o600}


@pytest.mark.parametrize("torn", [1, 4, 8, 12])
def test_a_torn_tail_is_cut_at_start(tmp_path: Path, torn: int):
    log = CaptureLog(tmp_path / "log")
    for n in range(3):
        log.append(entry(n))
    path = segments(log.folder)[-1].path
    log.close()
    whole = path.stat().st_size
    log = CaptureLog(tmp_path / "log")
    log.append(entry(3))
    log.close()
    os.truncate(path, whole + torn)
    log = CaptureLog(tmp_path / "log")
    assert (log.end, log.torn) == (3, torn)
    log.append(entry(4))
    assert numbers(log) == [0, 1, 2, 4]


@pytest.mark.parametrize("zeros", [1, 8, 16, 4096])
def test_zeros_that_a_power_cut_left_are_no_entries(tmp_path: Path, zeros: int):
    """A file system may keep that a file grew, and not what it grew by."""
    log = CaptureLog(tmp_path / "log")
    for number in range(3):
        log.append(entry(number))
    log.close()
    with segments(log.folder)[-1].path.open("ab") as file:
        file.write(bytes(zeros))
    log = CaptureLog(tmp_path / "log")
    assert (log.end, log.torn) == (3, zeros)
    assert log.append(entry(3)) == 3
    assert numbers(log) == [0, 1, 2, 3]


def test_a_name_that_a_power_cut_emptied_is_made_anew(tmp_path: Path):
    log = CaptureLog(tmp_path / "log")
    log.append(entry(0))
    source = log.source
    log.close()
    (log.folder / "source.json").write_bytes(b"")
    log = CaptureLog(tmp_path / "log")
    assert log.source != source
    assert numbers(log) == [0]


def test_a_damage_in_an_older_file_skips_the_rest_of_that_file_only(tmp_path: Path):
    log = CaptureLog(tmp_path / "log", segment_bytes=200)
    for n in range(20):
        log.append(entry(n))
    first, second = segments(log.folder)[:2]
    data = bytearray(first.path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    first.path.write_bytes(data)
    cursor = log.cursor(0)
    seen = [kept.seq for kept in cursor.take(100)]
    assert cursor.skipped > 0
    assert len(seen) + cursor.skipped == 20
    assert seen[-1] == 19
    assert second.first in seen


def test_kill_9_loses_nothing_that_append_returned(tmp_path: Path):
    code = (
        "import sys; from pathlib import Path\n"
        "from millrace.producers.capture.log import CaptureLog; from millrace.producers.capture.entry import Entry\n"
        "log = CaptureLog(Path(sys.argv[1]))\n"
        "while True: print(log.append(Entry('k', {'id': str(log.end)}, b'x' * 100)), flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "log")], stdout=subprocess.PIPE)
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) == 500:
            break
    process.kill()
    last = max((int(line) for line in process.stdout.read().split(b"\n")[:-1]), default=500)
    process.wait()
    log = CaptureLog(tmp_path / "log")
    assert log.end >= last + 1
    assert numbers(log) == list(range(log.end))


WRITER = """
import asyncio, sys
from pathlib import Path
from millrace.producers.capture.entry import BULK, Entry, encode
from millrace.producers.capture.log import CaptureLog

async def main():
    log = CaptureLog(Path(sys.argv[1]), segment_bytes=500, fsync=True)
    for number in range(log.end, log.end + 40):
        log.append(Entry("k", {"id": str(number)}, b"x" * 100))
        print(number, flush=True)
        await log.durable()
        log.release(number + 1, 0)

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("point", [name for name in fault_points("producers") if name.startswith("capture.")])
def test_a_kill_at_any_point_loses_nothing_that_append_returned(point: str, tmp_path: Path):
    """Three times in a row on one folder; the next start goes on where the numbers ended."""
    last = -1
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", WRITER, str(tmp_path / "log")],
            env={**os.environ, "MILLRACE_KILL": f"{point}:3"},
            capture_output=True,
            timeout=120,
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
        last = max([last, *map(int, done.stdout.split())])
        log = CaptureLog(tmp_path / "log", segment_bytes=500)
        assert last < log.end <= last + 2, "the last one may be there whose append did not return"
        assert numbers(log) == list(range(log.end))
        assert log.acked <= log.end
        log.close()


def test_a_full_disk_leaves_no_trace_and_keeps_room_for_markers(tmp_path: Path):
    disk = Disk(1000)
    log = CaptureLog(tmp_path / "log", write=disk.write)
    done = 0
    while disk.left > 200:
        log.append(entry(done, 100))
        done += 1
    with pytest.raises(LogFull, match="No space left"):
        log.append(entry(done, 1000))
    assert numbers(log) == list(range(done))
    before = log._reserved
    disk.left = 64 << 10  # what the reserve gives back
    log.append(entry(99, 0), from_reserve=True)
    assert log._reserved < before
    assert numbers(log) == [*range(done), 99]
    disk.left = 10_000
    log.append(entry(100))
    assert log._reserved == log.reserve_bytes


def test_a_reader_forgets_what_it_saw_of_a_write_that_failed(tmp_path: Path):
    seen: list[int] = []

    def torn(descriptor: int, data: bytes) -> int:
        if log.end == 1 and not seen:
            os.write(descriptor, data[: len(data) // 2])
            seen.extend(kept.seq for kept in cursor.take(10))  # reads ahead, into the half that is there
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.write(descriptor, data)

    log = CaptureLog(tmp_path / "log", write=torn)
    cursor = log.cursor(0)
    log.append(entry(0))
    with pytest.raises(LogFull):
        log.append(entry(1, 1000))
    log.append(entry(2))
    seen += [kept.seq for kept in cursor.take(10)]
    assert seen == [0, 1]
    cursor.close()
    log.close()


def test_a_position_that_a_power_cut_emptied_sends_everything_again(tmp_path: Path):
    log = CaptureLog(tmp_path / "log")
    for n in range(3):
        log.append(entry(n))
    log.release(2, 10)
    log.close()
    (tmp_path / "log" / "acked").write_bytes(b"")
    log = CaptureLog(tmp_path / "log")
    assert (log.acked, log.end, numbers(log)) == (0, 3, [0, 1, 2])


def test_too_much_waiting_is_full_too_but_markers_pass(tmp_path: Path):
    log = CaptureLog(tmp_path / "log", max_waiting=200)
    log.append(entry(0, 100))
    with pytest.raises(LogFull, match="wait to be sent"):
        log.append(entry(1, 100))
    log.append(entry(2, 100), from_reserve=True)
    kept = list(log.read(0))
    log.release(2, sum(k.size for k in kept))
    assert log.waiting == 0
    log.append(entry(3))


@pytest.mark.parametrize("sent", range(10))
def test_what_waits_is_counted_again_after_a_restart(tmp_path: Path, sent: int):
    log = CaptureLog(tmp_path / "log", segment_bytes=400)
    for n in range(9):
        log.append(entry(n, 60 + 10 * n))
    assert len(segments(log.folder)) > 3
    log.release(sent, sum(kept.size for kept in list(log.read(0))[:sent]))
    left = log.waiting
    log.close()
    log = CaptureLog(tmp_path / "log")
    assert sum(kept.size for kept in log.read(sent)) == log.waiting == left
    assert bool(left) == (sent < 9)


def test_to_count_what_waits_reads_only_the_file_where_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    log = CaptureLog(tmp_path / "log", segment_bytes=400)
    for n in range(30):
        log.append(entry(n, 100))
    log.release(1, next(log.read()).size)
    log.close()
    first, *_, last = [segment.path for segment in segments(log.folder)]
    opened: list[Path] = []
    whole = Path.open

    def noted(path: Path, *args: Any, **named: Any) -> Any:
        opened.append(path)
        return whole(path, *args, **named)

    monkeypatch.setattr(Path, "open", noted)
    CaptureLog(tmp_path / "log")
    assert {path for path in opened if path.suffix == ".log"} == {first, last}


def test_the_epoch_rises_when_sent_entries_are_missing(tmp_path: Path):
    log = CaptureLog(tmp_path / "log")
    for n in range(4):
        log.append(entry(n))
    log.release(4, 0)
    before = log.identity
    log.close()
    os.truncate(segments(log.folder)[-1].path, 0)
    log = CaptureLog(tmp_path / "log")
    assert (log.identity.source, log.identity.epoch) == (before.source, before.epoch + 1)
    assert log.acked == log.end == 0
    log.close()
    assert CaptureLog(tmp_path / "log").identity == log.identity


def test_the_epoch_rises_after_a_reboot_without_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    boot = tmp_path / "boot"
    boot.write_text("one")
    monkeypatch.setattr("millrace.producers.capture.log.BOOT", boot)

    def epoch(fsync: bool) -> int:
        log = CaptureLog(tmp_path / "log", fsync=fsync)
        log.append(entry(0))
        log.close()
        return log.identity.epoch

    first = epoch(False)
    assert epoch(False) == first
    boot.write_text("two")
    assert epoch(False) == first + 1
    boot.write_text("three")
    assert epoch(True) == first + 1


def test_one_process_owns_a_folder(tmp_path: Path):
    log = CaptureLog(tmp_path / "log")
    with pytest.raises(GatewayError, match="another process writes"):
        CaptureLog(tmp_path / "log")
    log.close()
    CaptureLog(tmp_path / "log").close()


def test_files_are_kept_until_sent_and_old(tmp_path: Path):
    log = CaptureLog(tmp_path / "log", segment_bytes=200)
    for n in range(20):
        log.append(entry(n))
    files = segments(log.folder)
    for segment in files:
        os.utime(segment.path, (0, 0))
    log.release(files[2].first, 0)
    assert log.forget(time.time() + 60) == 0
    assert log.forget(3600) == 2
    assert [s.first for s in segments(log.folder)] == [s.first for s in files[2:]]
    log.close()
    log = CaptureLog(tmp_path / "log", segment_bytes=200)
    assert (log.begin, log.end) == (files[2].first, 20)


def test_the_last_file_is_forgotten_too_once_it_is_sent_and_old(tmp_path: Path):
    log = CaptureLog(tmp_path / "log")
    for n in range(3):
        log.append(entry(n))
    (last,) = segments(log.folder)
    os.utime(last.path, (0, 0))
    assert log.forget(3600) == 0
    log.release(2, 0)
    assert log.forget(3600) == 0
    log.release(3, 0)
    assert log.forget(3600) == 1
    assert not last.path.exists()
    assert log.forget(3600) == 0
    log.append(entry(3))
    assert numbers(log) == [3]
    log.close()
    log = CaptureLog(tmp_path / "log")
    assert (log.begin, log.end, log.acked, numbers(log)) == (3, 4, 3, [3])


def test_a_file_is_closed_when_it_is_old_however_small_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    now = time.time()
    monkeypatch.setattr("millrace.producers.capture.log.time.time", lambda: now)
    log = CaptureLog(tmp_path / "log", segment_s=60)
    log.append(entry(0))
    now += 50
    log.append(entry(1))
    now += 20
    log.append(entry(2))
    log.append(entry(3))
    assert [segment.first for segment in segments(log.folder)] == [0, 2]
    log.close()
    os.utime(segments(log.folder)[0].path, (now, now))
    log = CaptureLog(tmp_path / "log", segment_s=60)
    log.append(entry(4))
    now += 70
    log.append(entry(5))
    assert [segment.first for segment in segments(log.folder)] == [0, 2, 5]
    assert numbers(log) == list(range(6))


def test_continuous_traffic_leaves_nothing_that_is_older_than_its_hours_and_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    now = time.time()
    monkeypatch.setattr("millrace.producers.capture.log.time.time", lambda: now)
    log, written = CaptureLog(tmp_path / "log", segment_s=10), {}
    for n in range(200):
        now += 3
        log.append(entry(n))
        written[n] = now
        os.utime(segments(log.folder)[-1].path, (now, now))
        log.release(n + 1, 0)
        log.forget(60)
        assert min(written[k] for k in numbers(log)) >= now - 60 - 10 - 3


async def test_fsync_is_shared_by_those_who_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls = 0

    def fsync(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        time.sleep(0.01)

    log = CaptureLog(tmp_path / "log", fsync=True)
    monkeypatch.setattr(os, "fsync", fsync)

    async def one(n: int) -> None:
        log.append(entry(n))
        await log.durable()

    await asyncio.gather(*(one(n) for n in range(20)))
    assert 1 <= calls <= 3
