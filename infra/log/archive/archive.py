"""All that is archived, under one root: `<root>/<topic>/<partition>/` holds segments and their manifest.

Invariants: a segment is named by its manifest after its bytes are on the disk, so a killed archiver leaves a file that
nobody reads and the next one replaces; what is read has the digest that the manifest names; one process writes a root
at a time (on one machine a lock sees to it; on shared storage run one archiver).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from fsspec.implementations.local import LocalFileSystem

from millrace.infra import durable, faults
from millrace.infra.errors import ArchiveError
from millrace.infra.log.archive.shelf import Segment, Shelf, decode, encode
from millrace.infra.log.base import Record
from millrace.infra.log.blobs import storage

if TYPE_CHECKING:
    import pyarrow as pa

    from millrace.infra.log.archive.segment import ArchivedRecord

MANIFEST = "manifest.json"
LOCK = ".lock"
DRAFT = ".draft"


class Archive:
    """Reads and writes an archive. Nothing is opened until it is asked for; a root that is not there is empty.
    Parquet is loaded with the first segment: every role has an archive at hand, and few read one."""

    def __init__(self, root: str) -> None:
        self._fs, path = storage(root)
        self.root = path.rstrip("/")
        self._local = isinstance(self._fs, LocalFileSystem)
        self._loaded: tuple[str, pa.Buffer] | None = None
        """name and bytes of the segment that was read last, checked"""
        self._claims: dict[str, tuple[str, int, Segment]] = {}
        """where the bytes of each claim lie, as far as it was looked"""

    # -- what there is

    def topics(self, prefix: str = "") -> list[str]:
        """Full names of the topics that something is kept of, sorted."""
        return [name for name in self._names(self.root) if name.startswith(prefix)]

    def shelves(self, topic: str) -> dict[int, Shelf]:
        """The shelf of each partition that something is kept of. Raises ArchiveError for a damaged manifest."""
        partitions = (int(name) for name in self._names(f"{self.root}/{topic}") if name.isdecimal())
        shelves = {partition: self.shelf(topic, partition) for partition in partitions}
        return {partition: shelf for partition, shelf in sorted(shelves.items()) if shelf is not None}

    def shelf(self, topic: str, partition: int) -> Shelf | None:
        """The shelf of a partition, as it is now; None when nothing is kept of it."""
        path = f"{self._folder(topic, partition)}/{MANIFEST}"
        try:
            data: bytes = self._fs.cat_file(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ArchiveError(f"{path} cannot be read: {error}. Check that its storage answers.") from error
        return decode(data, path)

    def _names(self, folder: str) -> list[str]:
        try:
            paths = [str(path).rstrip("/") for path in self._fs.ls(folder, detail=False)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(name for path in paths if not (name := path.rpartition("/")[2]).startswith("."))

    def _folder(self, topic: str, partition: int) -> str:
        return f"{self.root}/{topic}/{partition}"

    # -- reading

    def records(self, topic: str, partition: int, start: int, end: int) -> Iterator[Record]:
        """What is kept of [start, end), in order. Raises ArchiveError naming segment and offset of a damaged one."""
        shelf = self.shelf(topic, partition)
        for segment in shelf.within(start, end) if shelf else ():
            for row in self.rows(topic, partition, segment):
                if start <= row.record.offset < end:
                    yield row.record

    def fetch(self, topic: str, partition: int, offsets: Iterable[int]) -> dict[int, Record]:
        """The records at these offsets, as far as they are kept."""
        queue, shelf, records = sorted(set(offsets)), self.shelf(topic, partition), dict[int, Record]()
        while queue and shelf is not None:
            segment = shelf.holding(queue[0])
            if segment is None:
                queue.pop(0)
                continue
            here = {offset for offset in queue if offset < segment.end}
            queue = [offset for offset in queue if offset >= segment.end]
            for row in self.rows(topic, partition, segment):
                if row.record.offset in here:
                    records[row.record.offset] = row.record
        return records

    def claim_body(self, sha256: str) -> bytes | None:
        """The bytes behind a claim, by their digest; None when no segment holds them."""
        if sha256 not in self._claims:
            self._claims = {digest: where for where in self._segments() for digest in where[2].claims}
        if sha256 not in self._claims:
            return None
        topic, partition, segment = self._claims[sha256]
        offset = segment.claims[sha256]
        rows = self.rows(topic, partition, segment)
        return next((row.claimed for row in rows if row.record.offset == offset), None)

    def _segments(self) -> Iterator[tuple[str, int, Segment]]:
        for topic in self.topics():
            for partition, shelf in self.shelves(topic).items():
                yield from ((topic, partition, segment) for segment in shelf.segments)

    def rows(self, topic: str, partition: int, segment: Segment) -> Iterator[ArchivedRecord]:
        """The rows of a segment. Raises ArchiveError naming it, and the first offset that cannot be trusted."""
        from millrace.infra.log.archive.segment import read

        name = f"{self._folder(topic, partition)}/{segment.file}"
        data = self._load(name, topic, partition, segment)
        yield from read(data, topic, partition, name)

    def _load(self, name: str, topic: str, partition: int, segment: Segment) -> pa.Buffer:
        import pyarrow as pa

        from millrace.infra.log.archive.segment import read

        key = f"{name}#{segment.sha256}"
        if self._loaded is not None and self._loaded[0] == key:
            return self._loaded[1]
        try:
            data = pa.py_buffer(self._fs.cat_file(name))
        except FileNotFoundError as error:
            raise ArchiveError(
                f"{name} is gone, with offsets {segment.first} to {segment.end}: restore it from a copy"
            ) from error
        except OSError as error:
            raise ArchiveError(f"{name} cannot be read: {error}. Check that its storage answers.") from error
        if hashlib.sha256(data).hexdigest() != segment.sha256:
            for _ in read(data, topic, partition, name):
                pass  # names the offset where a record differs
            raise ArchiveError(
                f"{name} has other bytes than its manifest says, though its records read well: restore it"
            )
        self._loaded = key, data
        return data

    # -- writing

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the right to write. Raises ArchiveError when another process of this machine holds it."""
        if not self._local:
            yield
            return
        Path(self.root).mkdir(parents=True, exist_ok=True)
        handle = os.open(f"{self.root}/{LOCK}", os.O_RDWR | os.O_CREAT, durable.PRIVATE_MODE)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = os.pread(handle, 20, 0).decode(errors="replace").strip() or "unknown"
                raise ArchiveError(
                    f"{self.root} is being written by process {holder}: let it finish, or stop it"
                ) from error
            os.ftruncate(handle, 0)
            os.pwrite(handle, str(os.getpid()).encode(), 0)
            yield
        finally:
            os.close(handle)

    @contextmanager
    def drafting(self, topic: str, partition: int) -> Iterator[Path]:
        """A path for a draft of a segment, on the archive's own disk where that is local; gone afterwards."""
        if self._local:
            folder = Path(self._folder(topic, partition))
            durable.make_folder(folder, 0o700)
            path = folder / DRAFT
            try:
                yield path
            finally:
                with suppress(FileNotFoundError):
                    path.unlink()
        else:
            with TemporaryDirectory(prefix="millrace-archive-") as scratch:
                yield Path(scratch) / DRAFT

    def add(self, shelf: Shelf, segment: Segment, draft: Path) -> Shelf:
        """Make a written draft durable under its name, then name it in the manifest. Gives the shelf with it."""
        folder = self._folder(shelf.topic, shelf.partition)
        new_shelf = shelf.with_segment(segment, shelf.partitions)
        faults.point("archive.drafted")
        if self._local:
            draft.chmod(durable.PRIVATE_MODE)
            durable.name(draft, Path(folder) / segment.file)
            faults.point("archive.placed")
            durable.write(Path(folder) / MANIFEST, encode(new_shelf))
        else:
            self._fs.put_file(str(draft), f"{folder}/{segment.file}")
            faults.point("archive.placed")
            self._fs.pipe_file(f"{folder}/{MANIFEST}", encode(new_shelf))
        faults.point("archive.named")
        return new_shelf
