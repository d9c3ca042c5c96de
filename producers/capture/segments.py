"""Segment files: append-only, each entry length-prefixed and checksummed, named by the number of their first entry.

Layout of an entry: length of the payload (uint32, little-endian), crc32 of the payload (uint32), payload.

Invariants: entry numbers are dense over all files; only the last file is written; what lies behind the last whole entry
of the last file is torn (a process died in the middle of a write) and is cut off when the folder is opened."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HEAD = struct.Struct("<II")
SUFFIX = ".log"
BLOCK = 1 << 20


class SegmentFile(NamedTuple):
    """One file: entries from number `first` on."""

    path: Path
    first: int


class Scan(NamedTuple):
    """What a file holds: whole entries, and the length of the file up to the end of the last of them."""

    entries: int
    length: int


def path_of(folder: Path, first: int) -> Path:
    """The file whose first entry is number `first`."""
    return folder / f"{first:020d}{SUFFIX}"


def segments(folder: Path) -> list[SegmentFile]:
    """The files of a folder, oldest first."""
    return [SegmentFile(path, int(path.stem)) for path in sorted(folder.glob(f"*{SUFFIX}"))]


def frame(payload: bytes) -> bytes:
    """The bytes of one entry."""
    return HEAD.pack(len(payload), zlib.crc32(payload)) + payload


def seal(data: bytearray, rest: bytes = b"") -> bytearray:
    """Fill in the head of an entry whose payload stands behind it, the last of it in `rest`."""
    with memoryview(data) as view:
        checksum = zlib.crc32(rest, zlib.crc32(view[HEAD.size :]))
    HEAD.pack_into(data, 0, len(data) - HEAD.size + len(rest), checksum)
    return data


def is_sound(payload: bytes, length: int, checksum: int) -> bool:
    """Whether an entry is as its head says. None is empty: a power cut leaves zeros where a file had grown, and a head
    of zeros would describe nothing rightly."""
    return 0 < length == len(payload) and zlib.crc32(payload) == checksum


def entries(path: Path, start: int = 0) -> Iterator[tuple[bytes, int]]:
    """(payload, byte position after it) of the whole, sound entries of a file from byte `start` on.

    Stops in silence at the first that is torn or fails its checksum: ask `scan` where that is."""
    with path.open("rb", buffering=BLOCK) as file:
        file.seek(start)
        position = start
        while True:
            head = file.read(HEAD.size)
            if len(head) < HEAD.size:
                return
            length, checksum = HEAD.unpack(head)
            payload = file.read(length)
            if not is_sound(payload, length, checksum):
                return
            position += HEAD.size + length
            yield payload, position


def scan(path: Path) -> Scan:
    """Count the whole, sound entries of a file and find where they end."""
    count = length = 0
    for _, position in entries(path):
        count, length = count + 1, position
    return Scan(count, length)


def cut(path: Path, length: int) -> int:
    """Cut a torn tail off. Returns how many bytes it had."""
    torn = path.stat().st_size - length
    if torn:
        os.truncate(path, length)
    return torn
