"""Where each turn's outputs lie, and what they were: remembered while the topics are walked, asked for by turn.

Invariants: 24 bytes a record; outputs of a slot in one partition are asked for in the order of its turns, which is the
order in which they lie there; a digest covers key, headers and stored bytes."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from millrace.infra.log.base import Record

_encode = msgspec.msgpack.Encoder(order="deterministic").encode
Where = tuple[str, int]
"""kind of topic, partition"""


class Output(NamedTuple):
    """One record that a turn wrote: where in its partition, and the digest of it."""

    offset: int
    digest: int


def digest(key: bytes, headers: Mapping[str, bytes], value: bytes | None) -> int:
    """64 bits over everything of a record that its writer chose."""
    frame = _encode((key, dict(headers), value or b""))
    return int.from_bytes(blake2b(frame, digest_size=8).digest(), "little")


class _Lane:
    """What one slot wrote to one partition, in the order of the log."""

    __slots__ = ("at", "digests", "offsets", "turns")

    def __init__(self) -> None:
        self.turns, self.offsets, self.digests = array("q"), array("q"), array("Q")
        self.at = 0


class TurnOutputs:
    """Outputs by slot (`stage/slot`), partition and turn."""

    def __init__(self) -> None:
        self._lanes: dict[bytes, dict[Where, _Lane]] = {}

    def add(self, kind: str, record: Record) -> None:
        """Remember a record that names its turn; others are no outputs."""
        slot, _, number = record.headers.get("turn", b"").rpartition(b"/")
        if not slot or not number.isdigit() or len(number) > 18:
            return
        lane = self._lanes.setdefault(slot, {}).setdefault((kind, record.partition), _Lane())
        lane.turns.append(int(number))
        lane.offsets.append(record.offset)
        lane.digests.append(digest(record.key, record.headers, record.value))

    def take(self, slot: bytes, turn: int) -> dict[Where, list[Output]]:
        """Everything that a turn wrote, with earlier turns' outputs that nobody took. Call it with rising turns."""
        outputs: dict[Where, list[Output]] = {}
        for where, lane in self._lanes.get(slot, {}).items():
            while lane.at < len(lane.turns) and lane.turns[lane.at] <= turn:
                outputs.setdefault(where, []).append(Output(lane.offsets[lane.at], lane.digests[lane.at]))
                lane.at += 1
        return outputs

    def is_untouched(self, slot: bytes, where: Where) -> bool:
        """Whether nothing that the slot wrote to this partition was taken before: what is missing may be older."""
        lane = self._lanes.get(slot, {}).get(where)
        return lane is None or lane.at == 0

    def leftovers(self) -> Iterator[tuple[bytes, Where, int, int]]:
        """Outputs that nobody took: (slot, where, turn, offset)."""
        for slot, lanes in self._lanes.items():
            for where, lane in lanes.items():
                yield from ((slot, where, lane.turns[n], lane.offsets[n]) for n in range(lane.at, len(lane.turns)))
