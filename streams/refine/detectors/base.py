"""The detector seam: bytes in, flagged spans out.

Invariants that every sibling keeps (`tests/streams/refine/test_detectors.py`): spans lie inside the buffer and are not
empty; the same buffer gives the same hits; a hit never carries the value it found; no network; the number of hits is
bounded however dense the buffer, and what the bound leaves out still blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple


class Hit(NamedTuple):
    """One flagged span: bytes [start, end) of the buffer."""

    start: int
    end: int
    kind: str
    """what it looks like: aws_key, card, email, ..."""
    detector: str
    """which detector and rule said so"""
    blocks: bool
    """whether it must be taken out and withheld from learning; else it is a label only"""


class Detector(ABC):
    """Finds spans in UTF-8 text. `scan` raises only for its own failure, and then nothing of the text may pass."""

    name: str

    @abstractmethod
    def version(self) -> str:
        """Changes whenever the same text could give other hits: engine version and rules."""

    @abstractmethod
    def scan(self, text: bytes) -> list[Hit]:
        """Every hit, in order of start."""

    def close(self) -> None:
        """Let go of processes and memory. Idempotent."""
        return
