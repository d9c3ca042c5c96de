"""What changed from one version's weights to the next, as overwrites: elements whose bits differ, and their places.

    magic | xxh3-128 of the rest | length of the table | table | blocks        (table and blocks: zstd)

The table holds the header of the resulting file and, for each of its tensors, the xxh3-128 of the whole result and how
it comes about: `same`, `sparse` (gaps between changed places, new values) or `dense` (all values), whichever is
smallest. Numbers are stored by byte planes, first bytes first, which is what zstd needs to shrink them.

Invariants: what `compose` yields has the checksum of what was encoded, whatever base it was given, or it raises; so a
base that is not the parent can never be served. Overwriting is idempotent: a delta may be applied again, and a chain
may be applied from any version in it. Equal inputs give equal bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import cramjam
import numpy as np
import xxhash

from millrace.schemas import bounds
from millrace.schemas.json_values import JsonObject
from millrace.trainers.errors import CorruptCheckpoint
from millrace.trainers.weights.damage import corrupt_if_unreadable
from millrace.trainers.weights.tensorfile import SIZES, Bytes, Tensor, TensorFile, TensorSlot, slots

MAGIC = b"MRDELTA1"
LEVEL = 3
_CHECK, _LENGTH = 16, 8
_HEAD = len(MAGIC) + _CHECK + _LENGTH
_RATIO = 2**15
"""zstd shrinks nothing further than this"""
BLOCKS = {"same": 0, "sparse": 2, "dense": 1}
"""forms of a tensor -> how many blocks they have"""
_WORTHWHILE = 4
"""a sparse form below this share of the raw bytes is taken without trying the dense one"""


@dataclass(frozen=True, slots=True)
class TensorChanges:
    """One tensor of a delta. width: bytes of a gap; count: changed elements; blocks: (begin, end) in the body;
    checksum: xxh3-128 hex of the whole resulting tensor."""

    form: Literal["same", "sparse", "dense"]
    width: int
    count: int
    blocks: Sequence[tuple[int, int]]
    checksum: str


@dataclass(frozen=True, slots=True)
class Delta:
    """A delta whose bytes are whole. header: of the resulting file; slots: its tensors in order."""

    header: bytes
    slots: Sequence[TensorSlot]
    entries: Mapping[str, TensorChanges]
    body: memoryview

    @property
    def changed(self) -> int:
        """Elements that it overwrites."""
        return sum(entry.count for entry in self.entries.values())


def encode(base: Mapping[str, Tensor], target: TensorFile) -> bytes:
    """The delta that makes `target` of `base`. What `base` lacks, or has in another dtype or shape, is dense."""
    blocks: list[bytes] = []
    table: JsonObject = {}
    at = 0
    for name, tensor in target.tensors.items():
        form, width, count, content = _encode(base.get(name), tensor)
        bounds = []
        for block in content:
            bounds.append((at, at + len(block)))
            at += len(block)
        blocks += content
        table[name] = [form, width, count, bounds, xxhash.xxh3_128_hexdigest(tensor.data.data)]
    text = json.dumps({"header": target.header.decode("latin-1"), "tensors": table}, separators=(",", ":")).encode()
    table_bytes = bytes(cramjam.zstd.compress(text, level=LEVEL))
    rest = b"".join((len(table_bytes).to_bytes(_LENGTH, "little"), table_bytes, *blocks))
    return MAGIC + xxhash.xxh3_128_digest(rest) + rest


def decode(data: bytes) -> Delta:
    """The delta in `data`. Raises CorruptCheckpoint when any of its bytes is not what `encode` wrote."""
    view = memoryview(data)
    if len(view) < _HEAD or view[: len(MAGIC)] != MAGIC:
        raise CorruptCheckpoint("this is no weight delta: read the whole version instead")
    rest = view[len(MAGIC) + _CHECK :]
    if xxhash.xxh3_128_digest(rest) != view[len(MAGIC) : len(MAGIC) + _CHECK]:
        raise CorruptCheckpoint("a weight delta is truncated or changed: read the whole version instead")
    with corrupt_if_unreadable("the table of a weight delta"):
        return _table(rest)


def _table(rest: memoryview) -> Delta:
    end = _LENGTH + int.from_bytes(rest[:_LENGTH], "little")
    room = np.empty(min(bounds.TABLE_BYTES, _RATIO * len(rest)), np.uint8)
    size = cramjam.zstd.decompress_into(rest[_LENGTH:end], room.data)
    table = json.loads(room[:size].tobytes())
    header = table["header"].encode("latin-1")
    tensors = slots(header)
    entries = {name: _entry(*about) for name, about in table["tensors"].items()}
    for slot in tensors:
        _check(entries[slot.name], slot, len(rest) - end)
    return Delta(header, tensors, entries, rest[end:])


def _entry(
    form: Any, width: object, count: object, blocks: Iterable[tuple[int, int]], checksum: object
) -> TensorChanges:
    if form not in BLOCKS or type(width) is not int or type(count) is not int or not isinstance(checksum, str):
        raise ValueError("an entry of impossible kinds")
    return TensorChanges(form, width, count, [(int(begin), int(stop)) for begin, stop in blocks], checksum)


def _check(entry: TensorChanges, slot: TensorSlot, body: int) -> None:
    """ValueError for an entry whose numbers are not of its tensor."""
    elements = math.prod(slot.shape)
    if len(entry.blocks) != BLOCKS[entry.form]:
        raise ValueError(f"{slot.name} has {len(entry.blocks)} blocks")
    if entry.form == "sparse" and entry.width not in (1, 2, 4, 8):
        raise ValueError(f"{slot.name} has gaps of {entry.width} bytes")
    if entry.count < 0 or entry.count > elements or (entry.form == "dense" and entry.count != elements):
        raise ValueError(f"{slot.name} has {elements} elements, of which {entry.count} change")
    if any(not 0 <= begin <= stop <= body for begin, stop in entry.blocks):
        raise ValueError(f"{slot.name} lies outside of the delta")


def compose(base: Mapping[str, Tensor], deltas: Sequence[Delta]) -> Iterator[tuple[str, Bytes]]:
    """(name, bytes) of every tensor of the version that the last of `deltas` leads to, in file order, one at a time.

    deltas: a chain in order; its first delta's parent is `base`, or a version between `base` and its own result. Raises
    CorruptCheckpoint when what comes out is not what was encoded."""
    last = deltas[-1]
    for slot in last.slots:
        with corrupt_if_unreadable(f"a weight delta, at {slot.name},"):
            data = _overlay(base.get(slot.name), deltas, slot)
        if xxhash.xxh3_128_hexdigest(data.data) != last.entries[slot.name].checksum:
            raise CorruptCheckpoint(f"{slot.name} does not come out of these deltas: their base is another version")
        yield slot.name, data


# ---------------------------------------------------------------------------- one tensor


def _encode(base: Tensor | None, tensor: Tensor) -> tuple[str, int, int, list[bytes]]:
    """(form, width of a gap, changed elements, blocks)."""
    total = tensor.data.size // tensor.size
    if base is None or (base.dtype, base.shape) != (tensor.dtype, tensor.shape):
        return "dense", 0, total, [_pack(tensor.data, tensor.size)]
    bits = tensor.data.view(_uint(tensor.size))
    places = np.flatnonzero(base.data.view(bits.dtype) != bits)
    if not places.size:
        return "same", 0, 0, []
    gaps = np.diff(places, prepend=-1)
    width = next(size for size in (1, 2, 4, 8) if int(gaps.max()) < 1 << 8 * size)
    sparse = [
        _pack(gaps.astype(_uint(width)).view(np.uint8), width),
        _pack(bits[places].view(np.uint8), tensor.size),
    ]
    cost = sum(map(len, sparse))
    if cost * _WORTHWHILE >= tensor.data.size:
        dense = _pack(tensor.data, tensor.size)
        if len(dense) <= cost:
            return "dense", 0, total, [dense]
    return "sparse", width, int(places.size), sparse


def _overlay(base: Tensor | None, deltas: Sequence[Delta], slot: TensorSlot) -> Bytes:
    steps = [(delta, delta.entries[slot.name]) for delta in deltas if slot.name in delta.entries]
    dense = max((at for at, (_, entry) in enumerate(steps) if entry.form == "dense"), default=-1)
    size = SIZES[slot.dtype]
    if dense >= 0:
        delta, entry = steps[dense]
        data = _unpack(delta, entry.blocks[0], entry.count, size)
    elif base is None or (base.dtype, base.shape) != (slot.dtype, slot.shape):
        raise CorruptCheckpoint(f"{slot.name} is not in the version that these deltas begin from")
    else:
        data = base.data
    changes = [(delta, entry) for delta, entry in steps[dense + 1 :] if entry.form == "sparse"]
    if changes and dense < 0:
        data = np.array(data)
    for delta, entry in changes:
        if entry.count == 0:
            continue
        gaps = _unpack(delta, entry.blocks[0], entry.count, entry.width).view(_uint(entry.width))
        places = np.cumsum(gaps, dtype=np.int64) - 1
        if int(gaps.max()) > data.size or places[0] < 0 or data.size // size <= places[-1]:
            raise CorruptCheckpoint(f"a weight delta has places beyond the end of {slot.name}")
        values = _unpack(delta, entry.blocks[1], entry.count, size)
        data.view(_uint(size))[places] = values.view(_uint(size))
    return data


def _uint(size: int) -> np.dtype[np.unsignedinteger]:
    """The unsigned integers of `size` bytes: bits are compared, never numbers."""
    return np.dtype(f"<u{size}")


def _pack(data: Bytes, size: int) -> bytes:
    """zstd of the byte planes of elements of `size` bytes."""
    planes = np.ascontiguousarray(data.reshape(-1, size).T)
    return bytes(cramjam.zstd.compress(planes.reshape(-1).data, level=LEVEL))


def _unpack(delta: Delta, bounds: tuple[int, int], count: int, size: int) -> Bytes:
    """uint8 [count * size]; the reverse of `_pack`."""
    planes = np.empty(count * size, np.uint8)
    if cramjam.zstd.decompress_into(delta.body[slice(*bounds)], planes.data) != planes.size:
        raise CorruptCheckpoint("a block of a weight delta has another length than its table says")
    return np.ascontiguousarray(planes.reshape(size, count).T).reshape(-1)
