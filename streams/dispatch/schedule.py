"""Where batches begin and end: batch k is the ready seqs [start(k), end(k)), start(k + 1) = end(k).

Invariants: batches tile the sequence; the schedule is changed only beyond every outstanding deadline, so an end that a
grant relied on never moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchSchedule:
    """Batch `version` begins at seq `seq_hi`; `sizes` are (first seq, B) with rising seqs."""

    version: int
    seq_hi: int
    sizes: Sequence[Sequence[int]]

    def size(self, seq: int) -> int:
        """B of a batch that begins at `seq`."""
        current = self.sizes[0][1]
        for first, size in self.sizes:
            if first > seq:
                break
            current = size
        return current

    def end(self, batch: int) -> int:
        """One past the last seq of a batch. A batch before `version` is over: it ended at `seq_hi` or before."""
        at = self.seq_hi
        for _ in range(self.version, batch + 1):
            at += self.size(at)
        return at

    def batch_of(self, seq: int) -> int:
        """The batch that holds `seq` (at least `seq_hi`)."""
        batch, end = self.version, self.seq_hi + self.size(self.seq_hi)
        while seq >= end:
            batch += 1
            end += self.size(end)
        return batch

    def with_size(self, after: int, size: int) -> tuple[int, list[list[int]]]:
        """(first seq, sizes) when B becomes `size` behind batch `after`, or behind a change that waits already."""
        first = max(self.end(after), self.sizes[-1][0])
        return first, [[at, b] for at, b in self.sizes if at < first] + [[first, size]]
