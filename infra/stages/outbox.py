"""Emits to bytes: encoding, claims, and the places of emits inside other emits.

Invariants: emits of one turn to one topic are sent in the order in which they were yielded, even when some wait for
places; every output record carries the header `turn` = stage/slot/number, so that it leads back to what made it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from millrace.infra import faults
from millrace.infra.errors import StageError, TooLargeError
from millrace.infra.log.base import Outgoing, Place, Receipt, Transactor
from millrace.infra.log.blobs import LARGEST, ClaimStore
from millrace.infra.log.topics import full_name
from millrace.infra.stages.base import Emit, Later
from millrace.schemas import codec, records
from millrace.schemas.errors import CorruptRecord

ScopedRef = tuple[int, str]
Encoding = bytes | frozenset[str]
"""the record of an emit as bytes, or the refs of the places that it waits for"""
Entry = tuple[int, Emit, Encoding]
"""scope, emit, and what it is encoded to"""

BESIDE_BYTES = 64 << 10
"""key and headers of a record together: what no claim can stand for and still fits beside `LARGEST`"""
_PLACEHOLDER = {"topic": "", "partition": 0, "offset": 0}


def refs_in(value: object) -> Iterator[str]:
    """The refs of every Later inside a record."""
    if isinstance(value, Later):
        yield value.ref
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from refs_in(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from refs_in(part)


def fill_places(value: object, places: Mapping[str, Mapping[str, object]]) -> Any:
    """A copy of a record with every Later replaced by the place of its ref."""
    if isinstance(value, Later):
        return places[value.ref]
    if isinstance(value, Mapping):
        return {key: fill_places(part, places) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [fill_places(part, places) for part in value]
    return value


def encode_emit(emit: Emit) -> Encoding:
    """What an emit is encoded to. Raises whatever keeps it from being written: CorruptRecord, TooLargeError for a key
    and headers that are too long, or what encoding them raises."""
    beside = len("".join((emit.key, *emit.headers, *emit.headers.values())).encode())
    if beside > BESIDE_BYTES:
        raise TooLargeError(
            f"key and headers of a record are longer than {BESIDE_BYTES} bytes: bound the names in them"
        )
    try:
        return codec.encode_by_name(emit.name, emit.record)
    except CorruptRecord:
        refs = frozenset(refs_in(emit.record))
        if not refs:
            raise
    codec.encode_by_name(emit.name, fill_places(emit.record, dict.fromkeys(refs, _PLACEHOLDER)))
    return refs


def phases_of(emits: Sequence[tuple[int, Emit]], encodings: Sequence[Encoding]) -> Iterator[list[Entry]]:
    """The emits in phases: each needs places of former phases alone, and no topic's order is broken.

    Raises StageError for a ref that is used twice or never, or that waits for itself."""
    waiting = [(scope, emit, data) for (scope, emit), data in zip(emits, encodings, strict=True)]
    places: set[ScopedRef] = set()
    while waiting:
        phase: list[Entry] = []
        later: list[Entry] = []
        behind: set[str] = set()
        for scope, emit, data in waiting:
            if emit.topic in behind or any((scope, ref) not in places for ref in needs(data)):
                behind.add(emit.topic)
                later.append((scope, emit, data))
            else:
                phase.append((scope, emit, data))
        refs = [(scope, emit.ref) for scope, emit, _ in phase if emit.ref]
        twice = [ref for at, (scope, ref) in enumerate(refs) if (scope, ref) in places or (scope, ref) in refs[:at]]
        if twice:
            raise StageError(f"two emits for one record are named {twice[0]!r}: give each its own ref")
        if not phase:
            names = sorted({ref for _, _, data in later for ref in needs(data)})
            raise StageError(f"no emit for the same record is named {', '.join(names)}, or they wait for each other")
        yield phase
        places.update(refs)
        waiting = later


def needs(data: Encoding) -> frozenset[str]:
    """The refs of the places that an emit waits for."""
    return frozenset() if isinstance(data, bytes) else data


class Outbox:
    """Sends the emits of one namespace's stages."""

    def __init__(self, namespace: str, claims: ClaimStore | None = None, *, largest: int = LARGEST) -> None:
        self._namespace = namespace
        self._claims = claims
        self._largest = largest
        self._topics: dict[str, str] = {}

    def send(
        self,
        transactor: Transactor,
        emits: Sequence[tuple[int, Emit]],
        turn: bytes,
        encodings: Sequence[Encoding],
    ) -> dict[str, int]:
        """Send all emits of a turn in the open transaction; returns how many went to each logical topic.

        `encodings`: what each is encoded to. Raises StageError for a ref that is used twice or never, and for a record
        too large without a claim store."""
        counts: dict[str, int] = {}
        for _, emit in emits:
            counts[emit.topic] = counts.get(emit.topic, 0) + 1
        if any(emit.ref for _, emit in emits):
            self._send_in_phases(transactor, phases_of(emits, encodings), turn)
            return counts
        for (_, emit), data in zip(emits, encodings, strict=True):
            transactor.send(self.encode(emit, data, turn), wants_place=False)
        return counts

    def _send_in_phases(self, transactor: Transactor, phases: Iterator[list[Entry]], turn: bytes) -> None:
        places: dict[ScopedRef, records.Place] = {}
        receipts: dict[ScopedRef, Receipt] = {}
        for number, phase in enumerate(phases):
            if number:
                transactor.flush()
                faults.point("runner.after_places")
                places |= {ref: as_record(receipt.place) for ref, receipt in receipts.items()}
                receipts = {}
            for scope, emit, data in phase:
                out = self.encode(emit, data, turn, {ref: places[scope, ref] for ref in needs(data)})
                receipt = transactor.send(out, wants_place=bool(emit.ref))
                if emit.ref:
                    receipts[scope, emit.ref] = receipt

    def encode(
        self, emit: Emit, data: Encoding, turn: bytes, places: Mapping[str, Mapping[str, object]] = MappingProxyType({})
    ) -> Outgoing:
        """The record to write for an emit. `data`: what it is encoded to; `places`: those that it waits for."""
        value = data if isinstance(data, bytes) else codec.encode_by_name(emit.name, fill_places(emit.record, places))
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


def as_record(place: Place) -> records.Place:
    """A place as its Avro record."""
    return {"topic": place.topic, "partition": place.partition, "offset": place.offset}
