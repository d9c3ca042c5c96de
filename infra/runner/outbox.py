"""Emits to bytes: encoding, claims, and the places of emits inside other emits.

Invariants: emits of one turn to one topic are sent in the order in which they were yielded, even when some wait for
places; every output record carries the header `turn` = stage/slot/number, so that it leads back to what made it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from infra import faults
from infra.bus.base import Outgoing, Place, Sent, Transactor
from infra.claims import LARGEST, ClaimStore
from infra.errors import StageError
from infra.stage import Emit, Later
from infra.topics import full_name
from schemas import codec

Scoped = tuple[int, str]


def refs_in(value: Any) -> Iterator[str]:
    """The refs of every Later inside a record."""
    if isinstance(value, Later):
        yield value.ref
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from refs_in(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from refs_in(part)


def filled(value: Any, places: Mapping[str, Mapping[str, Any]]) -> Any:
    """A copy of a record with every Later replaced by the place of its ref."""
    if isinstance(value, Later):
        return places[value.ref]
    if isinstance(value, Mapping):
        return {key: filled(part, places) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [filled(part, places) for part in value]
    return value


class Outbox:
    """Sends the emits of one namespace's stages."""

    def __init__(self, namespace: str, claims: ClaimStore | None = None, *, largest: int = LARGEST) -> None:
        self._namespace = namespace
        self._claims = claims
        self._largest = largest
        self._topics: dict[str, str] = {}

    def send(self, transactor: Transactor, emits: Sequence[tuple[int, Emit]], turn: bytes) -> dict[str, int]:
        """Send all emits of a turn in the open transaction; returns how many went to each logical topic.

        Raises StageError for a ref that is used twice or never, and for a record too large without a claim store."""
        counts: dict[str, int] = {}
        for _, emit in emits:
            counts[emit.topic] = counts.get(emit.topic, 0) + 1
        if not any(emit.ref for _, emit in emits):
            for _, emit in emits:
                transactor.send(self.encode(emit, emit.record, turn), placed=False)
            return counts
        self._send_in_phases(transactor, emits, turn)
        return counts

    def _send_in_phases(self, transactor: Transactor, emits: Sequence[tuple[int, Emit]], turn: bytes) -> None:
        waiting = [(scope, emit, frozenset(refs_in(emit.record))) for scope, emit in emits]
        known: dict[Scoped, dict[str, Any]] = {}
        while waiting:
            sent: dict[Scoped, Sent] = {}
            held: list[tuple[int, Emit, frozenset[str]]] = []
            behind: set[str] = set()
            for scope, emit, needs in waiting:
                if emit.topic in behind or any((scope, ref) not in known for ref in needs):
                    behind.add(emit.topic)
                    held.append((scope, emit, needs))
                    continue
                record = filled(emit.record, {ref: known[scope, ref] for ref in needs}) if needs else emit.record
                handed = transactor.send(self.encode(emit, record, turn), placed=bool(emit.ref))
                if emit.ref:
                    if (scope, emit.ref) in known or (scope, emit.ref) in sent:
                        raise StageError(f"two emits for one record are named {emit.ref!r}: give each its own ref")
                    sent[scope, emit.ref] = handed
            if len(held) == len(waiting):
                names = sorted({ref for _, _, needs in held for ref in needs})
                raise StageError(
                    f"no emit for the same record is named {', '.join(names)}, or they wait for each other"
                )
            if held:
                transactor.flush()
                faults.point("runner.after_places")
                known |= {ref: as_record(handed.place) for ref, handed in sent.items()}
            waiting = held

    def encode(self, emit: Emit, record: Mapping[str, Any], turn: bytes) -> Outgoing:
        """The record to write for an emit whose places are filled in."""
        value = codec.encode(emit.name, record)
        if self._claims is not None:
            value = self._claims.fitting(emit.name, value, self._largest)
        elif len(value) > self._largest:
            raise StageError(f"a {emit.name} of {len(value)} bytes needs a claims directory: set one")
        topic = self._topics.get(emit.topic)
        if topic is None:
            topic = self._topics[emit.topic] = full_name(self._namespace, emit.topic)
        headers = {name: text.encode() for name, text in emit.headers.items()}
        headers["turn"] = turn
        return Outgoing(topic, emit.key.encode(), value, headers, emit.partition)


def as_record(place: Place) -> dict[str, Any]:
    """A place as its Avro record."""
    return {"topic": place.topic, "partition": place.partition, "offset": place.offset}
