"""Every record about a subject: its events as captured and as governed, what was sealed, resolved and trained.

Invariant: a story holds all records of the subject's group, so that what became of one event can be told from what
became of its sample, and of that from its group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from millrace.consumers.why.find import NUMBER, Subject
from millrace.consumers.why.read import PolicyTopics, sought
from millrace.infra.log.base import Place, Record
from millrace.infra.log.history.kinds import (
    COMPLETIONS,
    DEAD_LETTERS,
    EVALUATIONS,
    EVENTS,
    GRANTS,
    LEDGER,
    RAW,
    RESOLUTIONS,
    TRAJECTORIES,
)
from millrace.infra.log.history.rows import Row, place_of
from millrace.infra.log.topics import partition_of
from millrace.schemas.records import (
    Completion,
    DeadLetter,
    Event,
    Grant,
    LedgerEntry,
    Resolution,
    TrainedGroup,
    Trajectory,
)


@dataclass(slots=True)
class Passage:
    """One captured event on its way: raw record, governed event, dead letters about either."""

    raw: Row[Event] | None
    event: Row[Event] | None = None
    raw_place: Place | None = None
    letters: list[Row[DeadLetter]] = field(default_factory=list)

    @property
    def row(self) -> Row[Event] | None:
        """The event as far as it can be read, the governed one first."""
        return self.event or self.raw


@dataclass(slots=True)
class Story:
    """The records of one subject, each list in log order."""

    subject: Subject
    passages: list[Passage] = field(default_factory=list)
    grants: list[Row[Grant]] = field(default_factory=list)
    samples: list[Row[Trajectory]] = field(default_factory=list)
    completions: list[Row[Completion]] = field(default_factory=list)
    resolutions: list[Row[Resolution]] = field(default_factory=list)
    ledger: list[Row[LedgerEntry]] = field(default_factory=list)
    letters: list[Row[DeadLetter]] = field(default_factory=list)
    """dead letters about what is no event"""

    @property
    def ticket(self) -> int | None:
        """The group's ticket, whoever names it."""
        tickets = [row["ticket"] for row in self.resolutions]
        tickets += [row["ticket"] for row in self.completions]
        tickets += [row["ticket"] for row in self.samples]
        return next((ticket for ticket in tickets if ticket is not None), self.subject.ticket)

    @property
    def resolution(self) -> Row[Resolution] | None:
        return self.resolutions[-1] if self.resolutions else None

    def trained(self) -> Iterator[tuple[Row[LedgerEntry], TrainedGroup]]:
        """Ledger entries with the group inside."""
        for row in self.ledger:
            for group in row["groups"]:
                if self._is_ours(group):
                    yield row, group

    def _is_ours(self, group: TrainedGroup) -> bool:
        return group["group"] == self.subject.group if self.subject.group else group["ticket"] == self.ticket


def tell(topics: PolicyTopics, subject: Subject) -> Story:
    """Collect the story of a subject."""
    story = Story(subject)
    if subject.key is not None:
        story.passages = _passages(topics, subject.key)
    _letters(topics, story)
    group = subject.group
    if group is not None:
        for kind in (TRAJECTORIES, EVALUATIONS):
            if count := topics.count(kind):
                story.samples += [r for r in topics.rows(kind, partition_of(group, count)) if r["group"] == group]
        story.completions = [r for r in topics.rows(COMPLETIONS) if r["group"] == group]
    for row in topics.rows(RESOLUTIONS):
        if (group and row["group"] == group) or (row["ticket"] is not None and row["ticket"] == story.ticket):
            story.resolutions.append(row)
    if story.ticket is None and group is not None and NUMBER.fullmatch(group):
        story.subject = subject = _with_ticket(subject, int(group))
    if (ticket := story.ticket) is not None:
        story.grants = [row for row in topics.rows(GRANTS) if row["ticket"] == ticket]
    if any(row["kind"] == "ready" for row in story.resolutions):
        story.ledger = [row for row in topics.rows(LEDGER) if any(map(story._is_ours, row["groups"]))]
    return story


def _with_ticket(subject: Subject, ticket: int) -> Subject:
    """A rollout's group is called after its ticket."""
    return replace(subject, ticket=ticket)


def _passages(topics: PolicyTopics, key: str) -> list[Passage]:
    """Raw and governed events of a key, matched by the place that the governed one names.

    Groups of another policy may have the same key. What another policy said in an episode of this one is part of it:
    every kind of event but a model's call is of the policy of its episode."""
    wanted = sought(key)

    def ours(record: Record) -> bool:
        return record.key == wanted

    passages: dict[Place, Passage] = {}
    if count := topics.count(RAW):
        for record in topics.records(RAW, partition_of(wanted, count), own=False):
            if ours(record):
                row, policy = topics.row(record), record.headers.get("policy", topics.policy.encode())
                if row is not None or policy == topics.policy.encode():
                    passages[record.place] = Passage(row, raw_place=record.place)
    if count := topics.count(EVENTS):
        for row in topics.rows(EVENTS, partition_of(wanted, count), ours, own=False):
            if row.name == "Event" and row["source_place"] is not None:
                place = place_of(row["source_place"])
                passages.setdefault(place, Passage(None, raw_place=place)).event = row
    found = [passages[place] for place in sorted(passages)]
    rows = [passage.row for passage in found if passage.row is not None]
    own = {row["root_trajectory"] for row in rows if _is_ours(row, topics) and row["kind"] != "model_call"}
    return [p for p in found if p.row is None or _is_ours(p.row, topics) or p.row["root_trajectory"] in own]


def _is_ours(row: Row[Event], topics: PolicyTopics) -> bool:
    """Whether an event is of the policy that the topics are read for."""
    return bool(row.record.get("policy", topics.policy) == topics.policy)


def _letters(topics: PolicyTopics, story: Story) -> None:
    """Dead letters to the event they are about, or to the story when they are about another record of the group."""
    by_place: dict[Place, Passage] = {}
    for passage in story.passages:
        if passage.raw_place is not None:
            by_place[passage.raw_place] = passage
        if passage.event is not None:
            by_place[passage.event.place] = passage
    for row in topics.rows(DEAD_LETTERS):
        found = by_place.get(place_of(row["place"]))
        if found is not None:
            found.letters.append(row)
        elif story.subject.group is not None and row["group"] == story.subject.group:
            story.letters.append(row)
