"""Recorded turns folded again, from the first one on, and compared with what they wrote.

Invariant: a slot whose inputs are still kept gives, turn by turn, the outputs it gave live and, at the end, the state
that its changelog holds. Places of outputs inside outputs are left out of the comparison: they depend on what others
wrote in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from infra.bus.base import Bus, Record
from infra.claims import ClaimStore
from infra.errors import ReplayError
from infra.runner.fold import Fold, Folded
from infra.runner.outbox import filled, refs_in
from infra.runner.state import State
from infra.stage import Emit, Stage
from infra.topics import changelog_of, full_name, partition_of, turns_of
from schemas import codec

_ANYWHERE = {"topic": "~anywhere", "partition": -1, "offset": -1}


def turns(bus: Bus, stage: str, namespace: str, slot: int) -> Iterator[dict[str, Any]]:
    """The Turn records of a slot, in order."""
    for record in bus.read(full_name(namespace, turns_of(stage)), slot):
        if record.value is not None:
            yield codec.decode_as("Turn", record.value)


def refold(bus: Bus, stage: Stage, namespace: str, slot: int) -> Iterator[tuple[dict[str, Any], Folded, State]]:
    """Each recorded turn of a slot with what it folds to now, and the state after it.

    Raises ReplayError when inputs are gone or the turn's own figures differ."""
    fold = Fold(stage, State(slot))
    readers: dict[tuple[str, int], Iterator[Record]] = {}
    for number, turn in enumerate(turns(bus, stage.name, namespace, slot)):
        if turn["number"] != number:
            raise ReplayError(
                f"{stage.name}[{slot}]: turn {number} is gone (found {turn['number']}): keep turns longer"
            )
        records: list[Record] = []
        for span in turn["ranges"]:
            where = (full_name(namespace, span["topic"]), span["partition"])
            if where not in readers:
                readers[where] = bus.read(*where, span["first"])
            records += _take(readers[where], span, f"turn {number} of {stage.name}[{slot}]")
        folded = fold.turn(records, turn["clock"])
        for field, now in (("now", folded.now), ("ranges", folded.ranges), ("duplicates", folded.duplicates)):
            if turn[field] != now:
                raise ReplayError(
                    f"{stage.name}[{slot}] turn {number}: {field} was {turn[field]}, is {now} when replayed"
                )
        yield turn, folded, fold.state
        for _ in fold.state.changes():
            """Ends the turn; the changelog is compared as a whole."""


def _take(reader: Iterator[Record], span: Mapping[str, Any], what: str) -> list[Record]:
    found = list(islice(reader, span["count"] + span["skipped"]))
    if not found or (found[0].offset, found[-1].offset) != (span["first"], span["last"]):
        raise ReplayError(f"{what} cannot be read again from {span['topic']}[{span['partition']}]: {dict(span)}")
    return found


def verify(bus: Bus, stage: Stage, namespace: str, slot: int, claims: ClaimStore | None = None) -> int:
    """Fold every turn of a slot again and compare all outputs and the final state; returns how many turns there are.

    The stage must be at rest. Raises ReplayError naming the first turn that differs."""
    written = _written(bus, stage, namespace, slot, claims)
    count, state = 0, State(slot)
    for turn, folded, after in refold(bus, stage, namespace, slot):
        _compare(bus, namespace, turn, [emit for _, emit in folded.emits], written.pop(turn["number"], {}))
        count, state = count + 1, after
    if written:
        raise ReplayError(f"{stage.name}[{slot}] wrote records in turns {sorted(written)}, which were never recorded")
    kept = State.restore(slot, bus.read(full_name(namespace, changelog_of(stage.name)), slot))
    if count and kept.snapshot() != state.snapshot():
        raise ReplayError(f"{stage.name}[{slot}]: the changelog differs from the state after {count} replayed turns")
    return count


Outputs = dict[tuple[str, int], list[bytes]]


def _written(bus: Bus, stage: Stage, namespace: str, slot: int, claims: ClaimStore | None) -> dict[int, Outputs]:
    """Values that a slot wrote, by turn and by (logical topic, partition)."""
    topics = sorted({topic for turn in turns(bus, stage.name, namespace, slot) for topic in turn["emitted"]})
    mine = f"{stage.name}/{slot}/".encode()
    found: dict[int, Outputs] = {}
    for topic in topics:
        full = full_name(namespace, topic)
        for partition in range(bus.partitions(full)):
            for record in bus.read(full, partition):
                made_by = record.headers.get("turn", b"")
                if made_by.startswith(mine):
                    value = (claims.resolve(record) if claims else record).value
                    outputs = found.setdefault(int(made_by[len(mine) :]), {})
                    outputs.setdefault((topic, partition), []).append(value or b"")
    return found


def _compare(bus: Bus, namespace: str, turn: Mapping[str, Any], emits: Sequence[Emit], written: Outputs) -> None:
    what = f"turn {turn['number']} of {turn['stage']}[{turn['slot']}]"
    for emit in emits:
        count = bus.partitions(full_name(namespace, emit.topic))
        where = (emit.topic, partition_of(emit.key, count) if emit.partition is None else emit.partition)
        places = dict.fromkeys(refs_in(emit.record), _ANYWHERE)
        expected = codec.encode(emit.name, filled(emit.record, places) if places else emit.record)
        if not written.get(where):
            raise ReplayError(f"{what} did not write the {emit.name} to {where} that it gives when replayed")
        actual = written[where].pop(0)
        if expected != actual and not (places and _same(codec.decode(expected), codec.decode(actual))):
            raise ReplayError(f"{what} wrote another {emit.name} to {where} than it gives when replayed")
    left = {where: len(values) for where, values in written.items() if values}
    if left:
        raise ReplayError(f"{what} wrote records that it does not give when replayed: {left}")


def _same(expected: Any, actual: Any) -> bool:
    """Equal, where a placeholder equals any place."""
    if expected == _ANYWHERE:
        return isinstance(actual, dict) and actual.keys() == _ANYWHERE.keys()
    if isinstance(expected, dict):
        same_keys = isinstance(actual, dict) and expected.keys() == actual.keys()
        return same_keys and all(_same(value, actual[key]) for key, value in expected.items())
    if isinstance(expected, list | tuple):
        return len(expected) == len(actual) and all(map(_same, expected, actual))
    return bool(expected == actual or (expected != expected and actual != actual))  # NaN stands for "none"
