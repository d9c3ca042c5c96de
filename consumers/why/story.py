"""Every record about a subject: its events as captured and as governed, what was sealed, resolved and trained.

Invariant: a story holds all records of the subject's group, so that what became of one event can be told from what
became of its sample, and of that from its group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from consumers.audit.rows import Row, place_of
from consumers.why.find import Subject
from consumers.why.read import Topics
from infra.bus.base import Place, Record
from infra.topics import partition_of


@dataclass(slots=True)
class Passage:
    """One captured event on its way: raw record, governed event, dead letters about either."""

    raw: Row | None
    event: Row | None = None
    raw_place: Place | None = None
    letters: list[Row] = field(default_factory=list)

    @property
    def row(self) -> Row | None:
        """The event as far as it can be read, the governed one first."""
        return self.event or self.raw


@dataclass(slots=True)
class Story:
    """The records of one subject, each list in log order."""

    subject: Subject
    passages: list[Passage] = field(default_factory=list)
    grants: list[Row] = field(default_factory=list)
    samples: list[Row] = field(default_factory=list)
    completions: list[Row] = field(default_factory=list)
    resolutions: list[Row] = field(default_factory=list)
    ledger: list[Row] = field(default_factory=list)
    letters: list[Row] = field(default_factory=list)
    """dead letters about what is no event"""

    @property
    def ticket(self) -> int | None:
        """The group's ticket, whoever names it."""
        for row in (*self.resolutions, *self.completions, *self.samples):
            if row["ticket"] is not None:
                return int(row["ticket"])
        return self.subject.ticket

    @property
    def resolution(self) -> Row | None:
        return self.resolutions[-1] if self.resolutions else None

    def trained(self) -> Iterator[tuple[Row, dict[str, object]]]:
        """Ledger entries with the group inside."""
        for row in self.ledger:
            for group in row["groups"]:
                if self._is_ours(group):
                    yield row, group

    def _is_ours(self, group: dict[str, object]) -> bool:
        return group["group"] == self.subject.group if self.subject.group else group["ticket"] == self.ticket


def tell(topics: Topics, subject: Subject) -> Story:
    """Collect the story of a subject."""
    story = Story(subject)
    if subject.key is not None:
        story.passages = _passages(topics, subject.key)
    _letters(topics, story)
    group = subject.group
    if group is not None:
        for kind in ("trajectories", "evaluations"):
            if count := topics.count(kind):
                story.samples += [r for r in topics.rows(kind, partition_of(group, count)) if r["group"] == group]
        story.completions = [r for r in topics.rows("completions") if r["group"] == group]
    for row in topics.rows("resolutions"):
        if (group and row["group"] == group) or (row["ticket"] is not None and row["ticket"] == story.ticket):
            story.resolutions.append(row)
    if story.ticket is None and group is not None and group.isdigit():
        story.subject = subject = _with_ticket(subject, int(group))
    if (ticket := story.ticket) is not None:
        story.grants = [row for row in topics.rows("grants") if row["ticket"] == ticket]
    if any(row["kind"] == "ready" for row in story.resolutions):
        story.ledger = [row for row in topics.rows("ledger") if any(map(story._is_ours, row["groups"]))]
    return story


def _with_ticket(subject: Subject, ticket: int) -> Subject:
    """A rollout's group is called after its ticket."""
    return replace(subject, ticket=ticket)


def _passages(topics: Topics, key: str) -> list[Passage]:
    """Raw and governed events of a key, matched by the place that the governed one names."""
    wanted = key.encode()

    def ours(record: Record) -> bool:
        return record.key == wanted

    passages: dict[Place, Passage] = {}
    if count := topics.count("raw"):
        for record in topics.records("raw", partition_of(wanted, count)):
            if ours(record):
                row = topics.row(record)
                if row is None or row.record.get("policy", topics.policy) == topics.policy:
                    passages[record.place] = Passage(row, raw_place=record.place)
    if count := topics.count("events"):
        for row in topics.rows("events", partition_of(wanted, count), ours):
            if row.name == "Event" and row["source_place"] is not None:
                place = place_of(row["source_place"])
                passages.setdefault(place, Passage(None, raw_place=place)).event = row
    return [passages[place] for place in sorted(passages)]


def _letters(topics: Topics, story: Story) -> None:
    """Dead letters to the event they are about, or to the story when they are about another record of the group."""
    by_place: dict[Place, Passage] = {}
    for passage in story.passages:
        if passage.raw_place is not None:
            by_place[passage.raw_place] = passage
        if passage.event is not None:
            by_place[passage.event.place] = passage
    for row in topics.rows("dead-letters"):
        found = by_place.get(place_of(row["place"]))
        if found is not None:
            found.letters.append(row)
        elif story.subject.group is not None and row["group"] == story.subject.group:
            story.letters.append(row)
