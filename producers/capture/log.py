"""The capture log: what the gateway saw, on local disk, before the last byte of the reply leaves.

Invariants:

- `append` has handed the entry to the kernel when it returns: it survives kill -9. With `fsync` the entry also survives
  a power cut once `durable` returned; concurrent waiters share one fsync.
- Entry numbers (`seq`) are dense. The source's name is made once for a folder; its epoch rises when entries that were
  already sent on may be missing from the folder (the machine restarted without `fsync`, or fewer are there than were
  acknowledged), so that no number is used twice under one name. An entry carries the name it was numbered under.
- A failed write leaves no trace: the file is cut back (by a later append, where the disk refuses even that) and LogFull
  is raised, whatever the disk's error. `reserve` bytes are kept allocated, so that entries marked `reserved` (gap
  markers) still fit on a full disk.
- A file is closed when it is full or `segment_s` old, and `forget` closes one that is wholly sent and old enough: so
  content outlives the hours that it is kept for by at most `segment_s`, in a process that runs.
- One process owns a folder (flock). Folder 0700, files 0600: it holds raw content.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from itertools import groupby, islice, pairwise
from pathlib import Path

import msgspec

from millrace.infra import durable, faults
from millrace.infra.errors import GatewayError
from millrace.producers.capture.cursor import CaptureCursor
from millrace.producers.capture.entry import BULK, Entry, StoredEntry, decode, encode_into, head_into
from millrace.producers.capture.recent import Recent
from millrace.producers.capture.segments import HEAD, SegmentFile, cut, entries, is_sound, path_of, scan, seal, segments
from millrace.schemas.ids import new_id

SEGMENT_BYTES = 64 << 20
SEGMENT_S = 3600.0
RESERVE_BYTES = 4 << 20
RESERVE_STEP = 64 << 10
BOOT = Path("/proc/sys/kernel/random/boot_id")
PROBE = bytes(4096)
"""what is written to learn whether the disk takes anything: more than a block may have left"""
NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
Write = Callable[[int, bytes | bytearray], int]


class LogFull(GatewayError):
    """The capture log cannot take this entry: the disk is full or fails, or too much of it waits to be sent."""


class LogIdentity(msgspec.Struct):
    """Who numbers the entries of a folder, and under which boot of the machine it last did."""

    source: str
    epoch: int
    boot: str


class CaptureLog:
    """Open (or make) the log in `folder`. `name` becomes part of the source's name the first time.

    `max_waiting` bounds the bytes that were not sent on yet. Raises GatewayError when another process owns the folder.
    `write` is os.write; tests put a full disk in its place."""

    def __init__(
        self,
        folder: Path,
        *,
        name: str = "gateway",
        segment_bytes: int = SEGMENT_BYTES,
        reserve_bytes: int = RESERVE_BYTES,
        segment_s: float = SEGMENT_S,
        max_waiting: int = 4 << 30,
        fsync: bool = False,
        write: Write = os.write,
    ) -> None:
        self.folder = folder
        self.segment_bytes = segment_bytes
        self.segment_s = segment_s
        self.reserve_bytes = reserve_bytes
        self.max_waiting = max_waiting
        self.fsync = fsync
        self._write = write
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)
        self._lock = self._take_lock()
        self.acked = self.noted = _read_int(folder / "acked")
        self._appended = self._released = 0
        self.newest = (-1, 0)
        """the place of the entry that was appended last: its number, and the byte of its file at which it begins"""
        self._ragged = False
        files = segments(folder)
        last = files[-1] if files else SegmentFile(path_of(folder, self.acked), self.acked)
        self._file = os.open(last.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        last_scan = scan(last.path)
        self.torn = cut(last.path, last_scan.length)
        self._length = last_scan.length
        # At the earliest when the file before it was last written, which is known; it may be rolled early, never late.
        self._born = (files[-2].path if len(files) > 1 else folder / "lock").stat().st_mtime
        self._turn = threading.Lock()
        self.begin = files[0].first if files else self.acked
        self.end = last.first + last_scan.entries
        self.identity = self._identify(name)
        self._appended = self._unsent(files)
        self._reserve = os.open(folder / "reserve", os.O_RDWR | os.O_CREAT, 0o600)
        self._allocate_reserve()
        self._synced = self.end
        self._syncing: asyncio.Task[None] | None = None
        self._probe = -1
        self.recent = Recent()
        self.on_append: Callable[[], None] = lambda: None

    @property
    def source(self) -> str:
        """The name under which readers of `raw` keep a high-water mark."""
        return f"{self.identity.source}.{self.identity.epoch}"

    @property
    def waiting(self) -> int:
        """Bytes that were not sent on yet."""
        return self._appended - self._released

    def append(self, entry: Entry, *, from_reserve: bool = False) -> int:
        """Write an entry; returns its number. Raises LogFull and leaves no trace when it does not fit."""
        parts = frame_parts(entry)
        with self._turn:
            seq = self._append(entry, parts, from_reserve=from_reserve)
        self.on_append()
        return seq

    def _append(self, entry: Entry, parts: Sequence[bytes | bytearray], *, from_reserve: bool) -> int:
        size = sum(map(len, parts))
        if not from_reserve and self.waiting + size > self.max_waiting:
            raise self._behind()
        try:
            if from_reserve and self._reserved:
                self._shrink_reserve(size)
            self._cut_back()
            if self._length and self._length + size > self.segment_bytes:
                self._roll()
            elif self._length and time.time() - self._born > self.segment_s:
                with suppress(OSError):
                    self._roll()
            elif not self._length:
                self._born = time.time()
            self._put(parts)
        except OSError as error:
            raise self._write_error(error) from error
        faults.point("capture.appended")
        # Handed over before it counts, so that the forwarder need not look for it in the files.
        self.newest = (self.end, self._length - size)
        self.recent.put(StoredEntry(self.end, entry, size, self._length - size))
        seq, self.end = self.end, self.end + 1
        self._appended += size
        if not from_reserve and self._reserved < self.reserve_bytes:
            with suppress(OSError):  # the entry is written; what holds the reserve back is met again by the next
                self._allocate_reserve()
        return seq

    def check(self) -> None:
        """Raises LogFull where an entry would not be taken now: asked before there is one, so of a small one."""
        if self.waiting >= self.max_waiting:
            raise self._behind()
        try:
            if self._probe < 0:
                self._probe = os.open(self.folder / "probe", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                if self._write(self._probe, PROBE) < len(PROBE):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.ftruncate(self._probe, 0)
        except OSError as error:
            raise self._write_error(error) from error

    def _behind(self) -> LogFull:
        return LogFull(f"{self.waiting} bytes of {self.folder} wait to be sent: is the log (Kafka) reachable?")

    def _write_error(self, error: OSError) -> LogFull:
        fault = "no space in" if error.errno in NO_SPACE else "cannot write"
        return LogFull(f"{fault} {self.folder}: {error.strerror}")

    async def durable(self) -> None:
        """Return once everything appended so far survives what it should survive."""
        if not self.fsync:
            return
        target = self.end
        while self._synced < target:
            if self._syncing is None:
                self._syncing = asyncio.create_task(self._sync())
            await asyncio.shield(self._syncing)

    def read(self, seq: int = 0) -> Iterator[StoredEntry]:
        """What is kept from number `seq` on, up to the end at the time of the first."""
        end = self.end
        with closing(self.cursor(seq)) as cursor:
            while items := cursor.take(512):
                for item in items:
                    if item.seq >= end:
                        return
                    yield item

    def at(self, places: Iterable[tuple[int, int]]) -> Iterator[StoredEntry]:
        """The entries at these places (see `newest`), in the order of their numbers; those whose file is gone are left
        out. Raises GatewayError where no entry begins at a place."""
        files = segments(self.folder)
        firsts = [file.first for file in files]
        for number, group in groupby(sorted(places), key=lambda place: bisect_right(firsts, place[0]) - 1):
            if number < 0:
                continue
            with files[number].path.open("rb") as file:
                for seq, offset in group:
                    file.seek(offset)
                    head = file.read(HEAD.size)
                    length, checksum = HEAD.unpack(head) if len(head) == HEAD.size else (0, 0)
                    payload = file.read(length)
                    if not is_sound(payload, length, checksum):
                        raise GatewayError(f"{files[number].path} has no entry at byte {offset}")
                    yield StoredEntry(seq, decode(payload), HEAD.size + length, offset)

    def cursor(self, seq: int) -> CaptureCursor:
        """A reader from number `seq` on (or the oldest kept) that follows what is appended."""
        return CaptureCursor(self.folder, seq, lambda: self.end)

    def release(self, seq: int, size: int) -> None:
        """Everything before number `seq` reached `raw`; `size` bytes less wait. Written so that a crash repeats."""
        self.acked = seq
        self._released += size
        durable.write(self.folder / "acked", str(seq).encode(), sync=self.fsync)
        self.noted = seq
        faults.point("capture.acked")

    def forget(self, older_than_s: float) -> int:
        """Delete files that were sent on and not written for so long, also the last one. Returns how many. Any thread
        may call it."""
        limit = time.time() - older_than_s
        with self._turn:
            if self._length and self.acked >= self.end and os.fstat(self._file).st_mtime < limit:
                with suppress(OSError):
                    self._roll()
        files = segments(self.folder)
        old_files = [
            segment
            for segment, following in pairwise(files)
            if following.first <= self.acked and segment.path.stat().st_mtime < limit
        ]
        for segment in old_files:
            segment.path.unlink()
        return len(old_files)

    def close(self) -> None:
        """Let go of the folder. Idempotent."""
        for descriptor in (self._file, self._reserve, self._probe, self._lock):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self._reserve = self._probe = self._lock = -1

    # ------------------------------------------------------------------ opening

    def _take_lock(self) -> int:
        descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise GatewayError(
                f"another process writes {self.folder}: stop it, or give this gateway a capture_dir of its own"
            ) from None
        return descriptor

    def _unsent(self, files: Sequence[SegmentFile]) -> int:
        """Bytes from number `acked` on. Only the file that holds it is read: days of an outage may lie behind it."""
        if self.acked >= self.end:
            return 0
        here = bisect_right([file.first for file in files], self.acked) - 1
        size = sum(file.path.stat().st_size for file in files[max(here, 0) :])
        if here < 0:
            return size
        former = islice(entries(files[here].path), self.acked - files[here].first)
        return size - max((position for _, position in former), default=0)

    def _identify(self, name: str) -> LogIdentity:
        path, boot = self.folder / "source.json", BOOT.read_text().strip() if BOOT.exists() else ""
        identity = LogIdentity(f"{name}-{new_id()}", -1, "")
        with suppress(FileNotFoundError, msgspec.DecodeError):  # what a power cut left no name in gets another
            identity = msgspec.json.decode(path.read_bytes(), type=LogIdentity)
            if self.acked <= self.end and (self.fsync or identity.boot == boot):
                return identity
        # The epoch first: dying before the position is written raises it once more, which does no harm.
        identity = LogIdentity(identity.source, identity.epoch + 1, boot)
        durable.write(path, msgspec.json.encode(identity), sync=True)
        if self.acked > self.end:
            self.release(self.end, 0)
        return identity

    # ------------------------------------------------------------------ writing

    def _put(self, parts: Sequence[bytes | bytearray]) -> None:
        try:
            for data in parts:
                count = self._write(self._file, data)
                while count < len(data):
                    count += self._write(self._file, data[count:])
        except OSError:
            self._ragged = True
            with suppress(OSError):
                self._cut_back()
            raise
        self._length += sum(map(len, parts))

    def _cut_back(self) -> None:
        """Remove what a failed write left: nothing may be written behind it."""
        if self._ragged:
            os.ftruncate(self._file, self._length)
            self._ragged = False

    def _roll(self) -> None:
        if self.fsync:
            os.fsync(self._file)
        path = path_of(self.folder, self.end)
        following = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.close(self._file)
        self._file, self._length, self._born = following, 0, time.time()
        faults.point("capture.rolled")

    async def _sync(self) -> None:
        try:
            target = self.end
            await asyncio.get_running_loop().run_in_executor(None, os.fsync, self._file)
            faults.point("capture.synced")
            self._synced = target
        finally:
            self._syncing = None

    def _allocate_reserve(self) -> None:
        self._reserved = os.fstat(self._reserve).st_size
        try:
            os.posix_fallocate(self._reserve, 0, self.reserve_bytes)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
        self._reserved = os.fstat(self._reserve).st_size

    def _shrink_reserve(self, size: int) -> None:
        self._reserved = max(0, self._reserved - max(size, RESERVE_STEP))
        os.ftruncate(self._reserve, self._reserved)


def frame_parts(entry: Entry) -> list[bytes | bytearray]:
    """The bytes of an entry in a file, in parts: a long event is a part of its own and is not copied."""
    data = bytearray(HEAD.size)
    if len(entry.value) < BULK:
        encode_into(entry, data, HEAD.size)
        return [seal(data)]
    head_into(entry, data, HEAD.size)
    return [seal(data, entry.value), entry.value]


def _read_int(path: Path) -> int:
    """The number in a file; 0 where there is none, or a power cut left none: then what is kept is sent again."""
    try:
        return int(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return 0
