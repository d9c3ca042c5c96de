"""What an id or a place names: the trajectories that may be meant.

Invariants: ids are compared whole; an event of a sub-agent names its root; what several trajectories bear is never
decided here, whoever asks chooses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from millrace.consumers.why.find import find
from millrace.consumers.why.read import PolicyTopics, sought
from millrace.infra.log.base import Place, Record
from millrace.infra.log.history.kinds import EVALUATIONS, EVENTS, TRAJECTORIES
from millrace.infra.log.history.rows import Row
from millrace.infra.log.topics import partition_of
from millrace.schemas.records import Event

_PLACE = re.compile(r"(?P<topic>[\w.-]+)(?:\[(?P<one>\d{1,18})\]|/(?P<two>\d{1,18}))@(?P<offset>\d{1,18})")
SEALED = (TRAJECTORIES, EVALUATIONS)


@dataclass(frozen=True, slots=True, order=True)
class FoundTrajectory:
    """A trajectory: its tenant, group and id (that of the root), and which attempt it is."""

    tenant: str
    group: str
    id: str
    attempt: str = ""

    @property
    def key(self) -> str:
        """The key of its events."""
        return f"{self.tenant}/{self.group}"


def place_in(text: str) -> Place | None:
    """A place as people write it, topic[partition]@offset or topic/partition@offset; None for anything else."""
    found = _PLACE.fullmatch(text.strip())
    return Place(found["topic"], int(found["one"] or found["two"]), int(found["offset"])) if found else None


def candidates(topics: PolicyTopics, wanted: str) -> list[FoundTrajectory]:
    """The trajectories that are named, sorted; nothing for what nobody knows."""
    place = place_in(wanted)
    if place is not None:
        return sorted(set(_at(topics, place)))
    if found := set(_by_header(topics, wanted)) | set(_sealed(topics, wanted)):
        return sorted(found)
    if found := set(_by_attempt(topics, wanted)):
        return sorted(found)
    subject = find(topics, wanted)
    if subject is None:
        return []
    group = set(_of_group(topics, subject.key, subject.group))
    named = {one for one in group if subject.trajectory in (None, one.id)}
    return sorted(named or group)


def _of(row: Row[Event]) -> FoundTrajectory:
    return FoundTrajectory(row["tenant"], row["group"], row["root_trajectory"], row["attempt"])


def _at(topics: PolicyTopics, place: Place) -> Iterator[FoundTrajectory]:
    for event in topics.fetch(EVENTS, [place]):
        if event is not None and event.name == "Event":
            yield _of(event)
    for kind in SEALED:
        for row in topics.fetch(kind, [place]):
            if row is not None:
                yield FoundTrajectory(row["tenant"], row["group"], row["id"], row["attempt"])


def _by_header(topics: PolicyTopics, wanted: str) -> Iterator[FoundTrajectory]:
    """By what the headers of events say, without decoding the others."""
    value = sought(wanted)

    def named(record: Record) -> bool:
        return value in (record.headers.get("id"), record.headers.get("trajectory"))

    yield from (_of(row) for row in topics.rows(EVENTS, only=named) if row.name == "Event")


def _sealed(topics: PolicyTopics, wanted: str) -> Iterator[FoundTrajectory]:
    for kind in SEALED:
        for row in topics.rows(kind):
            if wanted in (row["id"], row["attempt"]):
                yield FoundTrajectory(row["tenant"], row["group"], row["id"], row["attempt"])


def _by_attempt(topics: PolicyTopics, wanted: str) -> Iterator[FoundTrajectory]:
    yield from (_of(row) for row in topics.rows(EVENTS) if row.name == "Event" and row["attempt"] == wanted)


def _of_group(topics: PolicyTopics, key: str | None, group: str | None) -> Iterator[FoundTrajectory]:
    if key is not None and (count := topics.count(EVENTS)):
        wanted = sought(key)
        own = topics.rows(EVENTS, partition_of(wanted, count), lambda record: record.key == wanted)
        yield from (_of(row) for row in own if row.name == "Event")
    if group is not None:
        for kind in SEALED:
            if count := topics.count(kind):
                for row in topics.rows(kind, partition_of(group, count)):
                    if row["group"] == group:
                        yield FoundTrajectory(row["tenant"], row["group"], row["id"], row["attempt"])
