"""What an id or a place names. Headers and small records are looked at first, bodies of events only when those say
nothing.

Invariants: ids are compared whole; a number is a ticket; an event of a sub-agent names its root; what several
trajectories bear is never decided here, whoever asks chooses."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from millrace.consumers.tell.topics import SAMPLE_KINDS, PolicyTopics, id_bytes
from millrace.infra.log.base import Place, Record
from millrace.infra.log.history.kinds import COMPLETIONS, DEAD_LETTERS, EVENTS, GRANTS, PROMPTS, RAW, RESOLUTIONS
from millrace.infra.log.history.rows import Row
from millrace.infra.log.topics import partition_of
from millrace.schemas.errors import SchemaError
from millrace.schemas.records import Event, ModelCall, Trajectory

BODY_IDS = {
    "model_call": (("response_id", "reply"), ("call_id", "call"), ("lineage", "lineage")),
    "tool_call": (("call_id", "tool call"),),
    "tool_result": (("call_id", "tool call"),),
    "reward": (("reward_id", "reward"),),
}
"""kind of event -> fields of its body that name something, and what"""
NUMBER = re.compile("[0-9]{1,18}")
"""a ticket as people write it; other digits, and more of them, may be a tenant's name for anything"""


@dataclass(frozen=True, slots=True)
class Subject:
    """What an id names: `kind` in words, and as much of what it belongs to as is known. `key` is the Kafka key
    `tenant/group` of its events, None when there are none."""

    id: str
    kind: str
    group: str | None = None
    key: str | None = None
    ticket: int | None = None
    trajectory: str | None = None
    event: str | None = None
    response: str | None = None
    tickets: tuple[int, ...] = ()


def find(topics: PolicyTopics, id: str) -> Subject | None:
    """The subject of an id, None when no topic knows it."""
    if NUMBER.fullmatch(id):
        return _ticket(topics, int(id))
    return _by_header(topics, id) or _by_group(topics, id) or _by_body(topics, id)


def _ticket(topics: PolicyTopics, ticket: int) -> Subject | None:
    """A ticket and the group that answered it, if any did."""
    groups: list[str | None] = [None for grant in topics.rows(GRANTS) if grant["ticket"] == ticket]
    groups += [completion["group"] for completion in topics.rows(COMPLETIONS) if completion["ticket"] == ticket]
    groups += [resolution["group"] for resolution in topics.rows(RESOLUTIONS) if resolution["ticket"] == ticket]
    if not groups:
        return None
    group = next(filter(None, groups), None)
    return Subject(str(ticket), "ticket", group, key=_key(topics, group or str(ticket)), ticket=ticket)


def _key(topics: PolicyTopics, group: str) -> str | None:
    """The key of a group's events."""
    id = id_bytes(group)
    for kind in (EVENTS, RAW):
        for record in topics.records(kind):
            if record.headers.get("group") == id:
                return record.key.decode(errors="replace")
    return None


def _by_header(topics: PolicyTopics, id: str) -> Subject | None:
    """An event, trajectory or group by the headers of events and raw events."""
    value = id_bytes(id)
    for kind in (EVENTS, RAW):
        for record in topics.records(kind):
            for header, noun in (("id", "event"), ("trajectory", "session"), ("group", "group")):
                if record.headers.get(header) == value:
                    return _from_event(id, noun, record)
    return None


def _from_event(id: str, noun: str, record: Record) -> Subject:
    headers = {name: value.decode("utf-8", "replace") for name, value in record.headers.items()}
    trajectory = headers.get("trajectory") if noun != "group" else None
    event = headers.get("id") if noun == "event" else None
    return Subject(id, noun, headers.get("group"), record.key.decode(errors="replace"), None, trajectory, event)


def _by_group(topics: PolicyTopics, id: str) -> Subject | None:
    """A group that is resolved, a prompt, or what a dead letter names."""
    for ticket in _tickets(topics, id):
        return Subject(id, "group", id, _key(topics, id), ticket)
    tickets = tuple(row["ticket"] for row in topics.rows(GRANTS) if row["prompt_id"] == id and not row["round"])
    if tickets or any(row["id"] == id for row in topics.rows(PROMPTS)):
        return Subject(id, "prompt", tickets=tickets)
    for row in topics.rows(DEAD_LETTERS):
        if id in (row["id"], row["event_id"], row["trajectory"], row["group"]):
            noun = "dead letter" if id == row["id"] else "event"
            return Subject(
                id,
                noun,
                row["group"],
                row.raw.key.decode(errors="replace"),
                None,
                row["trajectory"],
                row["event_id"],
            )
    return None


def _tickets(topics: PolicyTopics, group: str) -> Iterator[int | None]:
    """The ticket of each record about a group, None in those of a group that nobody asked for."""
    yield from (row["ticket"] for row in topics.rows(RESOLUTIONS) if row["group"] == group)
    yield from (row["ticket"] for row in topics.rows(COMPLETIONS) if row["group"] == group)
    yield from (row["ticket"] for row in topics.samples(group))


def _by_body(topics: PolicyTopics, id: str) -> Subject | None:
    """A reply, call, lineage, tool call, reward or attempt, inside events."""
    for kind in (EVENTS, RAW):
        for row in topics.rows(kind):
            if row.name == "Event" and (noun := _noun_in(row, id)) is not None:
                response = _reply(row) if row["kind"] == "model_call" and noun != "lineage" else None
                key = row.raw.key.decode(errors="replace")
                return Subject(id, noun, row["group"], key, None, row["root_trajectory"], row["id"], response)
    return None


def _reply(row: Row[Event]) -> str | None:
    """The id of the reply that a model call gave; None where its body is none."""
    try:
        call: ModelCall = row.body
    except SchemaError:
        return None
    return call["response_id"]


def _noun_in(row: Row[Event], id: str) -> str | None:
    """What the id names in this event, None when it does not occur."""
    if row["attempt"] == id:
        return "attempt"
    for field, noun in BODY_IDS.get(row["kind"], ()):
        try:
            if row.body[field] == id:
                return noun
        except SchemaError:
            return None
    return None


PLACE = re.compile(r"(?P<topic>[\w.-]+)(?:\[(?P<one>\d{1,18})\]|/(?P<two>\d{1,18}))@(?P<offset>\d{1,18})")


class EpisodeIds(NamedTuple):
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
    match = PLACE.fullmatch(text.strip())
    return Place(match["topic"], int(match["one"] or match["two"]), int(match["offset"])) if match else None


def episodes(topics: PolicyTopics, id: str) -> list[EpisodeIds]:
    """The trajectories that are named, sorted; nothing for what nobody knows."""
    place = place_in(id)
    if place is not None:
        events = topics.fetch(EVENTS, [place])
        return sorted({*_of_events(events), *map(_of_sample, _there(topics, place))})
    value = id_bytes(id)

    def is_named(record: Record) -> bool:
        return value in (record.headers.get("id"), record.headers.get("trajectory"))

    samples = [row for row in topics.samples() if id in (row["id"], row["attempt"])]
    if ids := {*_of_events(topics.rows(EVENTS, only=is_named)), *map(_of_sample, samples)}:
        return sorted(ids)
    if ids := {one for one in _of_events(topics.rows(EVENTS)) if one.attempt == id}:
        return sorted(ids)
    subject = find(topics, id)
    if subject is None:
        return []
    ids = set(map(_of_sample, topics.samples(subject.group))) if subject.group is not None else set()
    if subject.key is not None and (count := topics.count(EVENTS)):
        key = id_bytes(subject.key)
        ids.update(_of_events(topics.rows(EVENTS, partition_of(key, count), lambda record: record.key == key)))
    return sorted({one for one in ids if subject.trajectory in (None, one.id)} or ids)


def _there(topics: PolicyTopics, place: Place) -> Iterator[Row[Trajectory]]:
    """The sealed trajectory at a place, if one lies there."""
    yield from (row for kind in SAMPLE_KINDS for row in topics.fetch(kind, [place]) if row is not None)


def _of_sample(row: Row[Trajectory]) -> EpisodeIds:
    return EpisodeIds(row["tenant"], row["group"], row["id"], row["attempt"])


def _of_events(rows: Iterable[Row[Event] | None]) -> Iterator[EpisodeIds]:
    for row in rows:
        if row is not None and row.name == "Event":
            yield EpisodeIds(row["tenant"], row["group"], row["root_trajectory"], row["attempt"])
