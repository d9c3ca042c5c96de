"""Files that another process wrote: whatever is wrong with them is one error, which names the file.

Invariant: a reader that uses `corrupt_if_unreadable` raises CorruptCheckpoint and nothing else, whatever its bytes are.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager

import cramjam

from millrace.trainers.errors import CorruptCheckpoint

READ_ERRORS = (
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
"""What reading raises of damaged bytes: of their numbers, names, lengths or nesting."""


@contextmanager
def corrupt_if_unreadable(name: str) -> Iterator[None]:
    """Inside, every error of READ_ERRORS becomes CorruptCheckpoint about `name`."""
    try:
        yield
    except READ_ERRORS as error:
        reason = " ".join(str(error).split())[:200]
        raise CorruptCheckpoint(
            f"{name} is damaged ({type(error).__name__}: {reason}); restore it or use another version"
        ) from error
