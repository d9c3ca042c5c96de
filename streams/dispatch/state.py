"""What dispatch remembers.

Keys: `book` the counters, `rules` the settings in force, `clock` the newest time of each seal slot, `early` what came
before version 0, `asked` who asked for the release policy that waits, `q/<n>` prompts in line, `t/<ticket>` a ticket
that is not resolved, `h/<deadline>/<ticket>` one that is complete and waits for release.

Invariants: granted, negative and seq never fall; `waiting` counts every unresolved ticket, complete or not, under its
deadline; a ticket below `granted` without a key is resolved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self, TypeAlias, TypedDict

from millrace.infra.stages.base import Key, Table
from millrace.schemas.records import Completion, Decision, Prompt
from millrace.streams.dispatch.schedule import BatchSchedule

FieldValues: TypeAlias = dict[str, Any]
"""the fields of a `Book` or of `SettingsInForce`, which alone read and write them"""


class QueuedPrompt(TypedDict):
    """A prompt in line."""

    id: str
    task: str
    size: int | None
    awaits: list[str]
    tries: int
    """tickets that expired on it"""


class Ticket(TypedDict):
    """A ticket that is not resolved."""

    ticket: int
    prompt: QueuedPrompt
    size: int
    min_version: int
    deadline: int
    eta: int
    granted_at: int
    lease_until: int
    round: int
    done: Completion | None
    """of its group, once that is complete"""


class Advance(TypedDict):
    """What a ledger entry says to dispatch."""

    version: int
    seq_hi: int


BOOKS = Table[FieldValues]("book")
BOOK = BOOKS.key()
RULE_SETS = Table[FieldValues]("rules")
RULES = RULE_SETS.key()
CLOCKS = Table[list[int]]("clock")
CLOCK = CLOCKS.key()
EARLIES = Table[tuple[str, Prompt | Advance | Decision]]("early")
"""what came before version 0: its kind and the record"""
EARLY_KEY = EARLIES.key()
ASKS = Table[tuple[str, str]]("asked")
"""id and reason of the decision whose release policy waits"""
ASK = ASKS.key()
LINE = Table[QueuedPrompt]("q/")
TICKETS = Table[Ticket]("t/")
HELD_TICKETS = Table[int]("h/")


@dataclass(frozen=True, slots=True)
class Book:
    """The counters of admission: G, R, S, v and what is outstanding."""

    version: int
    seq_hi: int
    seq: int = 0
    """S: next ready seq, also how many groups were ever ready"""
    granted: int = 0
    """G: next ticket, also how many were ever granted, unsolicited ones included"""
    negative: int = 0
    """R: tickets resolved without a seq"""
    running: int = 0
    """tickets that are neither resolved nor complete"""
    waiting: Sequence[tuple[int, int]] = ()
    """(deadline, unresolved tickets that have it), rising deadlines"""
    unsolicited: Sequence[int] = ()
    """seqs of unsolicited groups that no committed version has consumed"""
    line: Sequence[int] = (0, 0)
    """prompts in line: [first, next) of `q/`"""
    prompt: int = -1
    """highest prompt number seen"""

    @classmethod
    def read(cls, value: Mapping[str, Any]) -> Self:
        return cls(**value)

    def to_values(self) -> FieldValues:
        return _field_values(self)

    @property
    def outstanding(self) -> int:
        """O: granted and not resolved."""
        return self.granted - self.negative - self.seq

    def urgent(self, deadline: int) -> int:
        """n_k: unresolved tickets with this deadline or an earlier one."""
        return sum(count for at, count in self.waiting if at <= deadline)

    def deadlines(self) -> list[int]:
        """Deadlines of unresolved tickets, rising."""
        return [at for at, _ in self.waiting]

    def granting(self, deadline: int) -> Self:
        """After a grant."""
        counts = dict(self.waiting)
        counts[deadline] = counts.get(deadline, 0) + 1
        return replace(self, granted=self.granted + 1, running=self.running + 1, waiting=_pairs(counts))

    def completing(self) -> Self:
        """After a ticket's group is complete."""
        return replace(self, running=self.running - 1)

    def resolving(self, deadline: int, *, is_ready: bool) -> Self:
        """After a complete ticket is resolved."""
        counts = dict(self.waiting)
        counts[deadline] -= 1
        seq, negative = (self.seq + 1, self.negative) if is_ready else (self.seq, self.negative + 1)
        return replace(self, seq=seq, negative=negative, waiting=_pairs(counts))

    def admitting(self) -> Self:
        """After an unsolicited group got the next ticket and the next seq."""
        return replace(self, granted=self.granted + 1, seq=self.seq + 1, unsolicited=[*self.unsolicited, self.seq])

    def advance(self, version: int, seq_hi: int) -> Self:
        """After a version is committed."""
        rest = [seq for seq in self.unsolicited if seq >= seq_hi]
        return replace(self, version=version, seq_hi=seq_hi, unsolicited=rest)


@dataclass(frozen=True, slots=True)
class SettingsInForce:
    """The settings in force."""

    sizes: Sequence[Sequence[int]]
    """(first seq, B), rising"""
    eta: int
    release: str
    next_release: str | None
    """release policy that waits until nothing is outstanding"""
    unsolicited_share: float
    lease: int
    """micros of log time"""
    max_running: int
    """most groups running at once; 0 is no limit"""
    group_size: int
    dynamic_sampling: bool = False
    """groups whose rewards are all equal get no seq"""

    @classmethod
    def read(cls, value: Mapping[str, Any]) -> Self:
        return cls(**value)

    def to_values(self) -> FieldValues:
        return _field_values(self)

    def schedule(self, book: Book) -> BatchSchedule:
        """The batches from the newest known version on."""
        return BatchSchedule(book.version, book.seq_hi, self.sizes)


def ticket_key(ticket: int) -> Key[Ticket]:
    return TICKETS.key(f"{ticket:015d}")


def held_key(deadline: int, ticket: int) -> Key[int]:
    return HELD_TICKETS.key(f"{deadline:012d}/{ticket:015d}")


def line_key(number: int) -> Key[QueuedPrompt]:
    return LINE.key(f"{number:015d}")


def _field_values(of: Book | SettingsInForce) -> FieldValues:
    return {field.name: getattr(of, field.name) for field in fields(of)}


def _pairs(counts: Mapping[int, int]) -> list[tuple[int, int]]:
    return [(at, count) for at, count in sorted(counts.items()) if count]
