"""What a layout is: how the samples of a group become rows of one other tool.

Invariants: a layout only says what a sample holds, it never computes tokens or text anew; a sample that it cannot say
is refused by a code and never left out in silence; it keeps no state from one group to the next, but for numbers that
it gives out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal

import pyarrow as pa

from millrace.dialects.dialogue import Unsayable
from millrace.formats.sample import ExportedSample

Content = dict[str, Any]
Turn = Callable[[ExportedSample, Unsayable], None]
"""hears of a sample that cannot be said"""
Form = Literal["jsonl", "parquet", "dataset"]


class ExportLayout(ABC):
    """One way of writing samples. A subclass says `rows`, or `pairs` of whole groups by overriding `group`."""

    name: ClassVar[str]
    """what `--layout` calls it"""
    help: ClassVar[str]
    """one line for people: what reads it, and what a row is"""
    form: ClassVar[Form] = "jsonl"
    schema: ClassVar[pa.Schema | None] = None
    """columns, of forms that have any"""
    has_tokens: ClassVar[bool] = False
    """whether its rows hold the exact tokens"""

    @abstractmethod
    def rows(self, sample: ExportedSample) -> list[Content]:
        """The rows of one sample. Raises Unsayable where the layout has no place for it."""

    def group(
        self, samples: Sequence[ExportedSample], refuse: Turn
    ) -> Iterator[tuple[Sequence[ExportedSample], list[Content]]]:
        """(samples, their rows) of one group."""
        for sample in samples:
            try:
                yield [sample], self.rows(sample)
            except Unsayable as error:
                refuse(sample, error)
