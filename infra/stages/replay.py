"""Recorded turns folded again, from the first one on, and compared with what they wrote.

Invariant: a slot whose inputs are still kept gives, turn by turn, the outputs it gave live and, at the end, the state
that its changelog holds. Places of outputs inside outputs are left out of the comparison: they depend on what others
wrote in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from millrace.infra.errors import InputGone, ReplayError
from millrace.infra.log.base import Bus, Record
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.topics import changelog_of, full_name, partition_of, turns_of
from millrace.infra.stages.base import Emit, Stage
from millrace.infra.stages.fold import Fold, FoldedTurn
from millrace.infra.stages.outbox import fill_places, refs_in
from millrace.infra.stages.state import SlotState
from millrace.schemas import codec
from millrace.schemas.records import Range, Turn

ANYWHERE = {"topic": "~anywhere", "partition": -1, "offset": -1}
"""stands for a place that is not compared"""


@dataclass(frozen=True, slots=True)
class ReplayedTurn:
    """One recorded turn, what it folds to now, and the state after it (valid until the next turn is asked for)."""

    record: Record
    turn: Turn
    folded: FoldedTurn
    state: SlotState

    def differences(self) -> list[tuple[str, object, object]]:
        """(field, as recorded, as folded) of the turn's own figures that differ."""
        turn, turn_now = self.turn, self.folded
        rows = (
            ("now", turn["now"], turn_now.now),
            ("ranges", turn["ranges"], turn_now.ranges),
            ("duplicates", turn["duplicates"], turn_now.duplicates),
        )
        return [(field, was, now) for field, was, now in rows if was != now]


def turns(bus: Bus, stage: str, namespace: str, slot: int, end: int | None = None) -> Iterator[tuple[Record, Turn]]:
    """The Turn records of a slot before offset `end`, in order, each with what it says."""
    for record in bus.read(full_name(namespace, turns_of(stage)), slot, 0, end):
        if record.value is not None:
            yield record, codec.decode_as("Turn", record.value)


def refold(bus: Bus, stage: Stage, namespace: str, slot: int, end: int | None = None) -> Iterator[ReplayedTurn]:
    """Each recorded turn of a slot (those before offset `end`) folded again, from the first on.

    Raises InputGone when a turn or what it folded is not there any more, ReplayError for a turn that names what no turn
    of this slot can have folded, and whatever the stage raises."""
    fold = Fold(stage, SlotState(slot), namespace=namespace)
    readers: dict[tuple[str, int], Iterator[Record]] = {}
    for number, (record, turn) in enumerate(turns(bus, stage.name, namespace, slot, end)):
        name = f"turn {turn['number']} of {stage.name}[{slot}]"
        if turn["number"] != number:
            raise InputGone(f"{stage.name}[{slot}]: turn {number} is gone (found {turn['number']}): keep turns longer")
        if (turn["clock"] is not None) != stage.clock:
            raise ReplayError(f"{name} has clock {turn['clock']}, which is not how {stage.name} tells the time")
        records: list[Record] = []
        for span in turn["ranges"]:
            home = slot if span["topic"] == stage.primary else 0 if span["topic"] in stage.sides else None
            if span["partition"] != home:
                raise ReplayError(f"{name} folded {span['topic']}[{span['partition']}], which it does not read")
            where = (full_name(namespace, span["topic"]), span["partition"])
            if where not in readers:
                readers[where] = bus.read(*where, span["first"])
            records += _take(readers[where], span, name)
        yield ReplayedTurn(record, turn, fold.turn(records, turn["clock"]), fold.state)
        fold.state.settle()


def _take(reader: Iterator[Record], span: Range, name: str) -> list[Record]:
    records = list(islice(reader, max(0, span["count"] + span["skipped"])))
    if not records or (records[0].offset, records[-1].offset) != (span["first"], span["last"]):
        raise InputGone(f"{name} cannot be read again from {span['topic']}[{span['partition']}]: {dict(span)}")
    return records


def verify(bus: Bus, stage: Stage, namespace: str, slot: int, claims: ClaimStore | None = None) -> int:
    """Fold every turn of a slot again and compare all outputs and the final state; returns how many turns there are.

    The stage must be at rest. Raises ReplayError naming the first turn that differs."""
    outputs = _outputs_by_turn(bus, stage, namespace, slot, claims)
    count, state = 0, SlotState(slot)
    for step in refold(bus, stage, namespace, slot):
        for field, was, now in step.differences():
            raise ReplayError(
                f"{stage.name}[{slot}] turn {step.turn['number']}: {field} was {was}, is {now} when replayed"
            )
        emits = [emit for _, emit in step.folded.emits]
        _compare(bus, namespace, step.turn, emits, outputs.pop(step.turn["number"], {}))
        count, state = count + 1, step.state
    if outputs:
        raise ReplayError(f"{stage.name}[{slot}] wrote records in turns {sorted(outputs)}, which were never recorded")
    saved_state = SlotState.restore(slot, bus.read(full_name(namespace, changelog_of(stage.name)), slot), claims=claims)
    if count and saved_state.snapshot() != state.snapshot():
        raise ReplayError(f"{stage.name}[{slot}]: the changelog differs from the state after {count} replayed turns")
    return count


Outputs = dict[tuple[str, int], list[bytes]]


def _outputs_by_turn(
    bus: Bus, stage: Stage, namespace: str, slot: int, claims: ClaimStore | None
) -> dict[int, Outputs]:
    """Values that a slot wrote, by turn and by (logical topic, partition)."""
    topics = sorted({topic for _, turn in turns(bus, stage.name, namespace, slot) for topic in turn["emitted"]})
    prefix = f"{stage.name}/{slot}/".encode()
    by_turn: dict[int, Outputs] = {}
    for topic in topics:
        name = full_name(namespace, topic)
        for partition in range(bus.partitions(name)):
            for record in bus.read(name, partition):
                made_by = record.headers.get("turn", b"")
                if made_by.startswith(prefix):
                    value = (claims.resolve(record) if claims else record).value
                    outputs = by_turn.setdefault(int(made_by[len(prefix) :]), {})
                    outputs.setdefault((topic, partition), []).append(value or b"")
    return by_turn


def _compare(bus: Bus, namespace: str, turn: Turn, emits: Sequence[Emit], outputs: Outputs) -> None:
    name = f"turn {turn['number']} of {turn['stage']}[{turn['slot']}]"
    for emit in emits:
        count = bus.partitions(full_name(namespace, emit.topic))
        where = (emit.topic, partition_of(emit.key, count) if emit.partition is None else emit.partition)
        places = dict.fromkeys(refs_in(emit.record), ANYWHERE)
        replay = codec.encode_by_name(emit.name, fill_places(emit.record, places) if places else emit.record)
        if not outputs.get(where):
            raise ReplayError(f"{name} did not write the {emit.name} to {where} that it gives when replayed")
        actual = outputs[where].pop(0)
        if replay != actual and not (places and is_equal(codec.decode(replay), codec.decode(actual))):
            raise ReplayError(f"{name} wrote another {emit.name} to {where} than it gives when replayed")
    surplus = {where: len(values) for where, values in outputs.items() if values}
    if surplus:
        raise ReplayError(f"{name} wrote records that it does not give when replayed: {surplus}")


def is_equal(expected: object, actual: object) -> bool:
    """Equal, where a placeholder equals any place."""
    if expected == ANYWHERE:
        return isinstance(actual, dict) and actual.keys() == ANYWHERE.keys()
    if isinstance(expected, dict):
        if not isinstance(actual, dict) or expected.keys() != actual.keys():
            return False
        return all(is_equal(value, actual[key]) for key, value in expected.items())
    if isinstance(expected, list | tuple):
        return (
            isinstance(actual, list | tuple) and len(expected) == len(actual) and all(map(is_equal, expected, actual))
        )
    return bool(expected == actual or (expected != expected and actual != actual))  # NaN stands for "none"
