"""What a layout is: how the rows of one tool become episodes.

Invariants: a layout only reads what a row says, it never invents a reply, a token or a time; a row that it cannot read
is refused by a code and never left out in silence; what it passes over in a row, it counts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, cast, get_args

from millrace.formats.episodes.episode import ClaimedReward, Episode, Group
from millrace.formats.episodes.rows import BadRow, Content, ImportRow, json_text, number_of, text_of
from millrace.formats.files import Refuse, RowReader, Watch
from millrace.schemas.records import EpisodeStatus, Split

REWARDS = ("reward", "score")
"""keys under which a row may hold its one number"""
TASKS = ("task_id", "prompt_id", "example_id", "id")
"""keys under which a row may name its task"""
STATUSES: tuple[str, ...] = get_args(EpisodeStatus)


class ImportLayout(ABC):
    """One way of reading rows. A subclass says `episodes` of a row, or `groups` of a whole file."""

    name: ClassVar[str]
    """what `--layout` calls it"""
    help: ClassVar[str]
    """one line for people: who writes it, and what a row is"""

    def __init__(self) -> None:
        self.passed: Counter[str] = Counter()
        """what was left out of rows that were read, by kind"""

    @classmethod
    @abstractmethod
    def fits(cls, content: Mapping[str, Any]) -> bool:
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


def rest(content: Mapping[str, Any], used: Collection[str]) -> str:
    """What a row says beside what became steps and rewards, as JSON: what is known of its task. Empty for nothing."""
    left = {name: value for name, value in content.items() if name not in used}
    return json_text(left) if left else ""


def reward_of(
    content: Mapping[str, Any], components: Mapping[str, Any] | None = None, name: str = ""
) -> list[ClaimedReward]:
    """The reward of a row, with its named parts. Raises BadRow for one that is no number."""
    key = name or next((one for one in REWARDS if one in content), "")
    if not key or content.get(key) is None:
        return []
    parts = {str(part): number_of(value, str(part)) for part, value in (components or {}).items() if value is not None}
    return [ClaimedReward(number_of(content[key], key), components=parts)]


def task_of(content: Mapping[str, Any]) -> str:
    """The task that a row names; empty where it names none."""
    return text_of(content, *TASKS)


def status_of(content: Mapping[str, Any]) -> EpisodeStatus:
    """How a row says that its episode ended. Raises BadRow for a way that is none."""
    status = content.get("status", "completed")
    if status not in STATUSES:
        raise BadRow("bad_status", f"no episode ends so: write one of {', '.join(STATUSES)}, or leave status out")
    return cast(EpisodeStatus, status)


def split_of(content: Mapping[str, Any]) -> Split:
    """Evaluation content stays evaluation content, whatever the command says."""
    return "evaluation" if content.get("split") == "evaluation" else "train"


def named(value: Any) -> Content:
    """A map, empty where a value is none."""
    return dict(value) if isinstance(value, Mapping) else {}
