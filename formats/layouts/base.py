"""What a format is: how the rows of one tool become episodes, and how the samples of a group become rows.

Invariants: a reader only reads what a row says, it never invents a reply, a token or a time; a writer only says what a
sample holds, it never computes tokens or text anew; a row that cannot be read and a sample that cannot be said are
refused by a code and never left out in silence; what a reader passes over in a row, it counts; a writer keeps no state
from one group to the next, but for numbers that it gives out."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import ClassVar, cast, get_args

import pyarrow as pa

from millrace.dialects.dialogue import Unsayable
from millrace.dialects.rendering.base import Message
from millrace.formats.episodes.episode import ClaimedReward, Episode, Group
from millrace.formats.episodes.rows import BadRow, Content, ImportRow, json_text, number_of, text_of
from millrace.formats.files import Form, Refuse, RowReader, Watch
from millrace.formats.sample import ExportedSample
from millrace.schemas.records import EpisodeStatus, Split

REWARDS = ("reward", "score")
"""keys under which a row may hold its one number"""
TASKS = ("task_id", "prompt_id", "example_id", "id")
"""keys under which a row may name its task"""
STATUSES: tuple[str, ...] = get_args(EpisodeStatus)
RefuseSample = Callable[[ExportedSample, Unsayable], None]
"""hears of a sample that cannot be said"""


class ImportLayout(ABC):
    """One way of reading rows. A subclass says `episodes` of a row, or `groups` of a whole file."""

    name: ClassVar[str]
    """what `--layout` calls it"""
    help: ClassVar[str]
    """one line for people: who writes it, and what a row is"""

    def __init__(self) -> None:
        self.omissions: Counter[str] = Counter()
        """what was left out of rows that were read, by kind"""

    @classmethod
    @abstractmethod
    def fits(cls, content: Content) -> bool:
        """Whether a row looks like one of this layout; the first that fits is taken."""

    @abstractmethod
    def episodes(self, row: ImportRow) -> Sequence[Episode]:
        """The episodes of a row, which are one group. Raises BadRow."""

    def groups(self, reader: RowReader, refuse: Refuse, watch: Watch) -> Iterator[Group]:
        """Every group of a file, in order."""
        for row in reader.rows(refuse, watch):
            try:
                yield Group(row.number, self.episodes(row))
            except BadRow as error:
                refuse(row.number, error)


def rest(content: Mapping[str, object], used: Collection[str]) -> str:
    """What a row says beside what became steps and rewards, as JSON: what is known of its task. Empty for nothing."""
    fields = {name: value for name, value in content.items() if name not in used}
    return json_text(fields) if fields else ""


def reward_of(
    content: Mapping[str, object], components: Mapping[str, object] | None = None, name: str = ""
) -> list[ClaimedReward]:
    """The reward of a row, with its named parts. Raises BadRow for one that is no number."""
    key = name or next((one for one in REWARDS if one in content), "")
    if not key or content.get(key) is None:
        return []
    parts = {str(part): number_of(value, str(part)) for part, value in (components or {}).items() if value is not None}
    return [ClaimedReward(number_of(content[key], key), components=parts)]


def task_of(content: Mapping[str, object]) -> str:
    """The task that a row names; empty where it names none."""
    return text_of(content, *TASKS)


def status_of(content: Mapping[str, object]) -> EpisodeStatus:
    """How a row says that its episode ended. Raises BadRow for a way that is none."""
    status = content.get("status", "completed")
    if status not in STATUSES:
        raise BadRow("bad_status", f"no episode ends so: write one of {', '.join(STATUSES)}, or leave status out")
    return cast(EpisodeStatus, status)


def split_of(content: Mapping[str, object]) -> Split:
    """Evaluation content stays evaluation content, whatever the command says."""
    return "evaluation" if content.get("split") == "evaluation" else "train"


def mapping_of(value: object) -> Content:
    """A map, empty where a value is none."""
    return dict(value) if isinstance(value, Mapping) else {}


class ExportLayout:
    """One way of writing samples. A subclass gives the `rows` of each sample, or those of a whole `group`."""

    name: ClassVar[str]
    """what `--layout` calls it"""
    help: ClassVar[str]
    """one line for people: what reads it, and what a row is"""
    form: ClassVar[Form] = "jsonl"
    schema: ClassVar[pa.Schema | None] = None
    """columns, of forms that have any"""
    has_tokens: ClassVar[bool] = False
    """whether its rows hold the exact tokens"""

    def rows(self, sample: ExportedSample) -> list[Content]:
        """The rows of one sample; none where a row is a group. Raises Unsayable where the layout has no place."""
        return []

    def group(
        self, samples: Sequence[ExportedSample], refuse: RefuseSample
    ) -> Iterator[tuple[Sequence[ExportedSample], list[Content]]]:
        """(samples, their rows) of one group."""
        for sample in samples:
            try:
                yield [sample], self.rows(sample)
            except Unsayable as error:
                refuse(sample, error)


def tools_text(tools: Sequence[Message]) -> str | None:
    """Tools as JSON, which TRL takes and whose columns never clash; null where there are none."""
    return json.dumps(tools) if tools else None
