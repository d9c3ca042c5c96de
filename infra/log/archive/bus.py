"""Topic and archive read as one history.

Invariants: what a topic still holds is read from it, what it has forgotten from the archive; `starts` is the first
offset from which nothing is missing up to the topic's end, so a hole between both is never read over in silence: what
lies before it is reached by `fetch` alone. Writing, groups and what follows a topic are the bus's own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Unpack

from millrace.infra.errors import TopicError
from millrace.infra.log.archive.archive import Archive
from millrace.infra.log.archive.shelf import Shelf
from millrace.infra.log.base import (
    Bus,
    GroupView,
    Member,
    MemberTerms,
    Place,
    Publisher,
    Record,
    Tail,
    TopicSpec,
    Transactor,
)


class ArchivedBus(Bus):
    """A bus whose topics begin where their archive begins. Closes the bus it was given."""

    def __init__(self, bus: Bus, archive: Archive) -> None:
        self._bus = bus
        self._archive = archive

    # -- what there is

    def topics(self, prefix: str) -> list[str]:
        return sorted({*self._bus.topics(prefix), *self._archive.topics(prefix)})

    def partitions(self, topic: str) -> int:
        try:
            return self._bus.partitions(topic)
        except TopicError:
            shelves = self._archive.shelves(topic)
            if not shelves:
                raise
            return max(shelf.partitions for shelf in shelves.values())

    def starts(self, topic: str) -> dict[int, int]:
        shelves = self._archive.shelves(topic)
        return {p: self._start(shelves.get(p), start) for p, start in self._topic_starts(topic, shelves).items()}

    def ends(self, topic: str) -> dict[int, int]:
        try:
            return self._bus.ends(topic)
        except TopicError:
            return self._archived_ends(topic)

    def log_ends(self, topic: str) -> dict[int, int]:
        try:
            return self._bus.log_ends(topic)
        except TopicError:
            return self._archived_ends(topic)

    def since(self, topic: str, moment: int) -> dict[int, int]:
        shelves = self._archive.shelves(topic)
        topic_starts, starts = self._topic_starts(topic, shelves), self.starts(topic)
        try:
            offsets = self._bus.since(topic, moment)
        except TopicError:
            offsets = self._archived_ends(topic)
        for partition, shelf in shelves.items():
            for segment in shelf.within(starts[partition], topic_starts[partition]):
                if segment.until >= moment:
                    rows = self._archive.records(topic, partition, segment.first, topic_starts[partition])
                    candidates = (record.offset for record in rows if record.timestamp >= moment)
                    offsets[partition] = next(candidates, offsets[partition])
                    break
        return offsets

    def _topic_starts(self, topic: str, shelves: Mapping[int, Shelf]) -> dict[int, int]:
        """The first offset that the topic holds, per partition; the archive's end for a topic that is gone."""
        try:
            return self._bus.starts(topic)
        except TopicError:
            if not shelves:
                raise
            return self._archived_ends(topic)

    def _start(self, shelf: Shelf | None, topic_start: int) -> int:
        return topic_start if shelf is None else shelf.start(topic_start)

    def _archived_ends(self, topic: str) -> dict[int, int]:
        shelves = self._archive.shelves(topic)
        ends = {partition: shelf.end or 0 for partition, shelf in shelves.items()}
        return {partition: ends.get(partition, 0) for partition in range(self.partitions(topic))}

    def check(self, topic: str) -> None:
        """Read whole what is kept of a topic that the topic itself has forgotten. Raises ArchiveError naming the first
        segment, and the offset, that is damaged."""
        shelves = self._archive.shelves(topic)
        for partition, topic_start in self._topic_starts(topic, shelves).items():
            for _ in self._archive.records(topic, partition, 0, topic_start):
                """Each record is compared with its digest as it is read."""

    # -- reading

    def read(self, topic: str, partition: int, start: int = 0, end: int | None = None) -> Iterator[Record]:
        stop = self.ends(topic)[partition] if end is None else end
        return self._pieces(topic, partition, start, stop)

    def _pieces(self, topic: str, partition: int, start: int, stop: int) -> Iterator[Record]:
        shelves = self._archive.shelves(topic)
        at = max(start, self._start(shelves.get(partition), self._topic_starts(topic, shelves)[partition]))
        # Retention may go on while the archive is read: look again until the topic holds what comes next.
        while at < (border := min(self._topic_starts(topic, shelves)[partition], stop)):
            yield from self._archive.records(topic, partition, at, border)
            at = border
        if at < stop:
            yield from self._bus.read(topic, partition, at, stop)

    def fetch(self, places: Sequence[Place]) -> list[Record | None]:
        in_topic, records = list[Place](), dict[Place, Record]()
        older: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        starts_by_topic = {topic: self._kept_or_none(topic) for topic in {place.topic for place in places}}
        for place in places:
            starts = starts_by_topic[place.topic]
            if starts is None or place.offset < starts.get(place.partition, 0):
                older[place.topic, place.partition].append(place.offset)
            else:
                in_topic.append(place)
        for place, record in zip(in_topic, self._bus.fetch(in_topic) if in_topic else [], strict=True):
            if record is not None:
                records[place] = record
            elif place.offset < self._bus.starts(place.topic).get(place.partition, 0):
                older[place.topic, place.partition].append(place.offset)  # forgotten since it was looked at
        for (topic, partition), offsets in older.items():
            rows = self._archive.fetch(topic, partition, offsets)
            records |= {Place(topic, partition, offset): record for offset, record in rows.items()}
        return [records.get(place) for place in places]

    def _kept_or_none(self, topic: str) -> dict[int, int] | None:
        try:
            return self._bus.starts(topic)
        except TopicError:
            if not self._archive.shelves(topic):
                raise
            return None

    def tail(self, positions: Mapping[tuple[str, int], int]) -> Tail:
        return self._bus.tail(positions)

    # -- the bus's own

    def publisher(self, *, gapless: bool = False) -> Publisher:
        return self._bus.publisher(gapless=gapless)

    def transactor(self, transactional_id: str) -> Transactor:
        return self._bus.transactor(transactional_id)

    def member(self, group: str, topic: str, **terms: Unpack[MemberTerms]) -> Member:
        return self._bus.member(group, topic, **terms)

    def group(self, group: str) -> GroupView:
        return self._bus.group(group)

    def expel(self, group: str, member_id: str) -> bool:
        return self._bus.expel(group, member_id)

    def is_settled(self, topic: str, partition: int) -> bool:
        return self._bus.is_settled(topic, partition)

    def mend(self) -> int:
        return self._bus.mend()

    def ensure_topics(self, specs: Sequence[TopicSpec]) -> None:
        self._bus.ensure_topics(specs)

    def check_topics(self, specs: Sequence[TopicSpec]) -> None:
        self._bus.check_topics(specs)

    def close(self) -> None:
        self._bus.close()
