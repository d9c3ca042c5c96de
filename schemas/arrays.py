"""Numeric arrays inside records: raw little-endian bytes beside their dtype, never Avro arrays of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from millrace.schemas.errors import CorruptRecord
from millrace.schemas.records import Array

DTYPES: dict[str, np.dtype[np.number]] = {
    "int32": np.dtype("<i4"),
    "int64": np.dtype("<i8"),
    "float32": np.dtype("<f4"),
    "uint8": np.dtype("u1"),
}


def pack(values: npt.NDArray[np.number] | Sequence[float], dtype: str | None = None) -> Array:
    """An array record of a 1-D array; `dtype` converts, else the array's own is kept.

    Raises CorruptRecord for a dtype that no reader knows."""
    array = np.asarray(values)
    name = dtype or array.dtype.name
    if name not in DTYPES:
        raise CorruptRecord(f"arrays of {name} are not stored; convert to one of {', '.join(DTYPES)}")
    return {"dtype": name, "data": np.ascontiguousarray(array, DTYPES[name]).tobytes()}


def unpack(record: Array) -> npt.NDArray[Any]:
    """The read-only 1-D array that `pack` stored. Raises CorruptRecord for unknown dtypes and ragged bytes."""
    dtype = DTYPES.get(record["dtype"])
    if dtype is None or len(record["data"]) % dtype.itemsize:
        raise CorruptRecord(f"{len(record['data'])} bytes are no array of {record['dtype']}")
    return np.frombuffer(record["data"], dtype)


def empty_array(dtype: str) -> Array:
    """An array record without elements."""
    return {"dtype": dtype, "data": b""}
