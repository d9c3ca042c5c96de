"""What topics hold once they are made again, kept in a file until it is written as segments.

Invariants: what lies in a topic and is equal goes out byte by byte, with its time and its offset; what was made again
stands at the offset of the record that it replaces, else at the one that others name for it, else where `placing` puts
it, and every place inside a record that is made again is that one; no topic has its name before all are whole.
"""

from __future__ import annotations

import shutil
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

from millrace.consumers.audit.turn_outputs import Where
from millrace.consumers.replay.rebuild.placing import TurnSpan, UnplacedRecord, place_records
from millrace.infra import durable, faults
from millrace.infra.errors import ReplayError
from millrace.infra.log.archive.archive import Archive
from millrace.infra.log.archive.filling import Ahead, Filler
from millrace.infra.log.archive.shelf import Shelf
from millrace.infra.log.base import Outgoing, Place, Record
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.stages.outbox import as_record
from millrace.schemas import codec

SEGMENT_BYTES = 64 << 20
DRAFT = ".rebuilding"
"""folder of topics that are not whole yet; readers of an archive pass over names with a dot"""
_FIRST = -2
"""the offset that stands for the first record whose place is not known yet; -1 stands for no place"""


class _SpoolEntry(NamedTuple):
    key: bytes
    value: bytes | None
    headers: list[tuple[str, bytes]]
    timestamp: int
    open: bool = False
    """whether places in it are not known yet"""


class SpooledRecord(NamedTuple):
    """A record of the rebuilt topic: which slot wrote it in which turn and when, where it belongs, where it is kept;
    number: under which others name it, while its place is not known."""

    lane: str
    turn: int
    at: int
    offset: int | None
    position: int
    number: int


class WrittenPartition(NamedTuple):
    """A partition that was written: its records, and how many of them stand where `placing` put them."""

    records: int
    estimated: int


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(_SpoolEntry)


class RebuildSpool:
    """`topics`: full names of topics by kind; `file`: an empty one, which nobody else uses."""

    def __init__(self, topics: Mapping[str, str], file: IO[bytes]) -> None:
        self._topic_names = topics
        self._file = file
        self._lying: defaultdict[Where, tuple[array[int], array[int]]]
        self._lying = defaultdict(lambda: (array("q"), array("q")))
        self._entries: defaultdict[Where, list[SpooledRecord]] = defaultdict(list)
        self._numbers = 0

    # -- filling

    def lay(self, kind: str, record: Record) -> None:
        """A record as it lies there, in the order of its partition."""
        offsets, positions = self._lying[kind, record.partition]
        offsets.append(record.offset)
        positions.append(
            self._put(_SpoolEntry(record.key, record.value, list(record.headers.items()), record.timestamp))
        )

    def keep(self, where: Where, offset: int, lane: str = "", turn: int = 0, at: int = 0) -> None:
        """The record at this offset stays as it is."""
        self._entries[where].append(SpooledRecord(lane, turn, at, offset, self._position(where, offset), 0))

    def make(
        self,
        where: Where,
        out: Outgoing,
        offset: int | None,
        lane: str,
        turn: int,
        at: int,
        *,
        number: int = 0,
        is_open: bool = False,
        replaces: bool = False,
    ) -> None:
        """A record that was made again. replaces: another one lies at its offset, whose time it takes; number: others
        name it by that; is_open: it names others so."""
        time = self._get(self._position(where, offset)).timestamp if replaces and offset is not None else at
        position = self._put(_SpoolEntry(out.key, out.value, list(out.headers.items()), time, is_open))
        self._entries[where].append(SpooledRecord(lane, turn, at, offset, position, number))

    def number(self, where: Where) -> tuple[int, Place]:
        """A number for a record whose place is not known yet, and the place that stands for it until then."""
        self._numbers += 1
        return self._numbers, Place(self._topic_names[where[0]], where[1], _FIRST - self._numbers)

    def _position(self, where: Where, offset: int) -> int:
        offsets, positions = self._lying[where]
        return positions[bisect_left(offsets, offset)]

    def _put(self, entry: _SpoolEntry) -> int:
        self._file.seek(0, 2)
        position = self._file.tell()
        data = _encode(entry)
        self._file.write(len(data).to_bytes(8, "little") + data)
        return position

    def _get(self, position: int) -> _SpoolEntry:
        self._file.seek(position)
        size = int.from_bytes(self._file.read(8), "little")
        return _decoder.decode(self._file.read(size))

    # -- writing

    def write(
        self,
        root: Path,
        kinds: Sequence[str],
        partitions: Mapping[str, int],
        read: Mapping[Where, Sequence[TurnSpan]],
        claims: ClaimStore,
    ) -> dict[str, WrittenPartition]:
        """Write these kinds of topic as an archive; gives what was written by kind. A topic appears there once all of
        them are written whole: one that is shorter would read as well. Raises ReplayError where one of them lies there
        already."""
        archive = Archive(str(root))
        offsets = {
            where: place_records([UnplacedRecord(*entry[:4]) for entry in entries], read.get(where, ()))
            for where, entries in self._entries.items()
        }
        names = {
            entry.number: as_record(Place(self._topic_names[where[0]], where[1], offset))
            for where, entries in self._entries.items()
            for entry, offset in zip(entries, offsets[where], strict=True)
            if entry.number
        }
        outputs = dict[str, WrittenPartition]()
        with archive.writing():
            for kind in kinds:
                if archive.shelves(self._topic_names[kind]):
                    raise ReplayError(
                        f"{root} holds segments of {self._topic_names[kind]}: name another directory with --out"
                    )
            drafts = root / DRAFT
            shutil.rmtree(drafts, ignore_errors=True)  # of one that was killed
            draft, filler = Archive(str(drafts)), Filler(claims, SEGMENT_BYTES)
            for kind in kinds:
                guesses = records = 0
                for partition in range(partitions[kind]):
                    where = (kind, partition)
                    entries = self._entries.get(where, [])
                    records += len(entries)
                    guesses += sum(entry.offset is None for entry in entries)
                    at = sorted(zip(offsets.get(where, ()), (entry.position for entry in entries), strict=True))
                    self._partition(draft, filler, where, partitions[kind], at, names)
                outputs[kind] = WrittenPartition(records, guesses)
            faults.point("rebuilt.drafted")
            for kind in kinds:
                _name(drafts, self._topic_names[kind], root)
            shutil.rmtree(drafts, ignore_errors=True)
        return outputs

    def _partition(
        self,
        archive: Archive,
        filler: Filler,
        where: Where,
        partitions: int,
        at: Sequence[tuple[int, int]],
        names: Mapping[int, Mapping[str, Any]],
    ) -> None:
        shelf, end = Shelf(self._topic_names[where[0]], where[1], partitions), at[-1][0] + 1 if at else 0
        records, first = Ahead(self._records(where, at, names)), 0
        while records.next is not None:
            with archive.drafting(shelf.topic, shelf.partition) as draft:
                result = filler.fill(draft, records, first, end)
                if result is None:
                    return
                shelf = archive.add(shelf, result.segment, draft)
                first = result.segment.end

    def _records(
        self, where: Where, at: Sequence[tuple[int, int]], names: Mapping[int, Mapping[str, Any]]
    ) -> Iterator[Record]:
        for offset, position in at:
            entry = self._get(position)
            value = _encode_with_places(entry.value, names) if entry.open else entry.value
            yield Record(
                self._topic_names[where[0]], where[1], offset, entry.key, value, dict(entry.headers), entry.timestamp
            )


def _name(drafts: Path, topic: str, root: Path) -> None:
    """Give a topic that is whole its name. What lies there already is of no manifest, and goes with the drafts."""
    if (drafts / topic).exists():
        durable.name(drafts / topic, root / topic, backup=durable.draft_of(drafts / topic))
        faults.point("rebuilt.named")


def _encode_with_places(value: bytes | None, names: Mapping[int, Mapping[str, Any]]) -> bytes:
    name, record = codec.decode(value or b"")
    return codec.encode_by_name(name, _with_places(record, names))


def _with_places(value: Any, names: Mapping[int, Mapping[str, Any]]) -> Any:
    """A copy in which the numbers of places are the places themselves."""
    if isinstance(value, dict):
        offset = value.get("offset")
        if value.keys() == {"topic", "partition", "offset"} and isinstance(offset, int) and offset < _FIRST:
            return names[_FIRST - offset]
        return {key: _with_places(part, names) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_with_places(part, names) for part in value]
    return value
