"""Files that somebody else wrote: whatever is odd in them is one error, which names the file.

Invariant: a reader of a sealed file raises CorruptCheckpoint and nothing else, whatever its bytes are.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager

import cramjam

from millrace.trainers.errors import CorruptCheckpoint

ODD = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    OSError,
    RecursionError,
    TypeError,
    ValueError,
    struct.error,
    cramjam.DecompressionError,
)
"""What reading bytes raises that are not what they should be: numbers, names, lengths, nesting of any kind."""


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Inside, all that odd bytes may raise becomes CorruptCheckpoint about `what`."""
    try:
        yield
    except ODD as error:
        said = " ".join(str(error).split())[:200]
        raise CorruptCheckpoint(
            f"{what} is damaged ({type(error).__name__}: {said}); restore it or use another version"
        ) from error
