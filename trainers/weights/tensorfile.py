"""Safetensors files as named bytes, without torch: dtypes that numpy lacks (bfloat16, float8) are bytes like any other.

Invariants: nothing is copied (arrays are views of the mapped file); a file that is cut short, or whose header does not
tile its bytes, is refused before any tensor is seen; the header's own bytes are kept, so that a file can be written
again bit for bit."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from millrace.schemas import bounds
from millrace.trainers.errors import CorruptCheckpoint
from millrace.trainers.weights.damage import corrupt_if_unreadable
from millrace.trainers.weights.manifest import is_plain

INDEX = "model.safetensors.index.json"
SIZES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
SIZES |= {"F32": 4, "I32": 4, "U32": 4, "F64": 8, "I64": 8, "U64": 8}
"""bytes of an element, by safetensors' name of its dtype"""

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Tensor:
    """data: uint8 [bytes], the elements in row order."""

    dtype: str
    shape: tuple[int, ...]
    data: Bytes

    @property
    def size(self) -> int:
        """Bytes of one element."""
        return SIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Where a tensor lies: its bytes are [begin, end) after the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class TensorFile:
    """header: the file's first bytes, up to the first tensor's; tensors: by name, in the order of the file."""

    header: bytes
    tensors: Mapping[str, Tensor]


def slots(header: bytes) -> list[TensorSlot]:
    """The tensors that a file's first bytes (length and JSON) name, in file order. Raises CorruptCheckpoint when they
    do not tile what follows."""
    with corrupt_if_unreadable("a safetensors header"):
        if len(header) > bounds.TABLE_BYTES:
            raise ValueError(f"{len(header)} bytes, more than {bounds.TABLE_BYTES}")
        (length,) = struct.unpack("<Q", header[:8])
        if length != len(header) - 8:
            raise ValueError("its length is wrong")
        tensors = [
            TensorSlot(
                name, str(about["dtype"]), tuple(int(n) for n in about["shape"]), *map(int, about["data_offsets"])
            )
            for name, about in json.loads(header[8:]).items()
            if name != "__metadata__"
        ]
        tensors.sort(key=lambda slot: (slot.begin, slot.end))
        at = 0
        for slot in tensors:
            if (
                slot.begin != at
                or min(slot.shape, default=0) < 0
                or slot.end - slot.begin != math.prod(slot.shape) * SIZES[slot.dtype]
            ):
                raise ValueError(f"{slot.name} has impossible bounds")
            at = slot.end
    return tensors


def slots_of(path: Path) -> list[TensorSlot]:
    """The tensors of one file, of which its header alone is read. Raises CorruptCheckpoint, naming it, when it is
    missing or not whole."""
    with corrupt_if_unreadable(f"{path} is no whole safetensors file: it"), path.open("rb") as file:
        first = file.read(8)
        length = int.from_bytes(first, "little") if len(first) == 8 else -1
        size = path.stat().st_size
        if not 0 <= length <= min(size, bounds.TABLE_BYTES):
            raise ValueError("truncated")
        tensors = slots(first + file.read(length))
        if 8 + length + (tensors[-1].end if tensors else 0) != size:
            raise ValueError("truncated")
        return tensors


def open_file(path: Path) -> TensorFile:
    """The tensors of one file. Raises CorruptCheckpoint, naming it, when it is missing or not whole."""
    try:
        data: Bytes = np.memmap(path, np.uint8, "r")
        length = int(data[:8].view("<u8")[0]) if data.size >= 8 else -1
        if not 0 <= length <= data.size - 8:
            raise ValueError("truncated")
        header = data[: 8 + length].tobytes() if length < bounds.TABLE_BYTES else b""
        tensors, body = slots(header), data[8 + length :]
        if body.size != (tensors[-1].end if tensors else 0):
            raise ValueError("truncated")
    except (OSError, ValueError, OverflowError, CorruptCheckpoint) as error:
        raise CorruptCheckpoint(f"{path} is no whole safetensors file ({error}); use another version") from error
    return TensorFile(header, {s.name: Tensor(s.dtype, s.shape, body[s.begin : s.end]) for s in tensors})


def weight_files(folder: Path) -> list[str]:
    """Names of the files from which an engine loads tensors: those of the index, else every *.safetensors. Raises
    CorruptCheckpoint when there is none."""
    index = folder / INDEX
    if index.exists():
        with corrupt_if_unreadable(str(index)):
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
            if not all(map(is_plain, names)):
                raise ValueError("it names what is no file beside it")
            return names
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    if not files:
        raise CorruptCheckpoint(f"{folder} has no *.safetensors; another version is needed")
    return files


def open_folder(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a Hugging Face directory. Raises CorruptCheckpoint."""
    return {name: tensor for file in weight_files(folder) for name, tensor in open_file(folder / file).tensors.items()}
