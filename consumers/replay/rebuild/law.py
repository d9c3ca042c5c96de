"""The law of a rebuild: turns folded again, as the audit folds them, and every record of the topics accounted for.

Invariants: each record of a topic that was asked for is counted once, as equal, different, additional, as another
policy's, or as not compared; each record that turns give and nobody has is counted as missing, or as forgotten where
retention took it. What is counted as neither equal nor forgotten is named, by place and field, never by content.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millrace.consumers.audit.facts import Facts
from millrace.consumers.audit.folds import Folds, Makers
from millrace.consumers.audit.refold import UNREADABLE, EmitPair, Refold, StopFolding
from millrace.consumers.audit.turn_outputs import Where
from millrace.consumers.audit.walk import Walk
from millrace.consumers.replay.rebuild.spool import RebuildSpool
from millrace.infra.log.base import Place, Record
from millrace.infra.log.topics import turns_of
from millrace.infra.stages.base import Emit, Later, Stage
from millrace.infra.stages.outbox import refs_in
from millrace.infra.stages.replay import ReplayedTurn

WRITERS: Mapping[str, tuple[str, ...]] = {
    "events": ("refine",),
    "trajectories": ("seal",),
    "evaluations": ("seal",),
    "completions": ("seal",),
    "grants": ("dispatch",),
    "resolutions": ("dispatch",),
    "dead-letters": ("refine", "seal", "dispatch"),
}
"""kinds of topic that stages alone write, and the roles that write them"""
LIST_LIMIT = 1000
"""differences of one topic that are kept; all are counted"""


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that is not as its turn gives it. `place` is None where nobody has it and nobody names it."""

    what: str
    place: Place | None
    turn: str
    """the turn that gives it, as stage/slot/number; empty where none does"""


@dataclass(slots=True)
class TopicTally:
    """What became of the records of one topic."""

    records: int = 0
    """that lie there"""
    equal: int = 0
    different: int = 0
    missing: int = 0
    additional: int = 0
    forgotten: int = 0
    """given by turns, and older than what is kept of the topic"""
    others: int = 0
    """of another policy's dispatch"""
    untried: int = 0
    """of turns that cannot be folded again"""
    later: int = 0
    """written since the rebuild began"""
    differences: list[Difference] = field(default_factory=list)

    def differs(self, text: str, place: Place | None, turn: str) -> None:
        if len(self.differences) < LIST_LIMIT:
            self.differences.append(Difference(text, place, turn))


class RebuildLaw(Folds):
    """Folds what the given makers make; `count`: partitions of a kind of topic; `spool` takes what the topics hold
    then."""

    name = "rebuild"
    sentence = "every turn folded again gives the records that lie in the topics"

    def __init__(
        self,
        facts: Facts,
        walk: Walk,
        makers: Makers,
        kinds: Sequence[str],
        count: Mapping[str, int],
        spool: RebuildSpool | None = None,
    ) -> None:
        super().__init__(facts, walk, makers)
        self._comparison = Refold(facts, walk, count.__getitem__)
        self._spool = spool
        self.tallies = {kind: TopicTally() for kind in kinds}
        self._writers = {kind: {self._names[role].encode() for role in WRITERS[kind]} for kind in kinds}
        self._folded: dict[str, int] = {}
        """the last turn that was folded, by slot (`stage/slot`)"""
        self._whole: set[str] = set()
        """slots whose turns were all folded"""

    # -- what lies there

    def record(self, kind: str, record: Record) -> None:
        tally = self.tallies.get(kind)
        if tally is None:
            super().record(kind, record)
            return
        tally.records += 1
        if self._spool:
            self._spool.lay(kind, record)
        slot, _, number = record.headers.get("turn", b"").rpartition(b"/")
        stage = slot.rpartition(b"/")[0]
        if stage in self._writers[kind] and number.isdigit() and len(number) <= 18:
            super().record(kind, record)
            return
        where = (kind, record.partition)
        if kind == "dead-letters" and stage.endswith(b".dispatch"):
            tally.others += 1
            self._keep(where, record.offset, record.timestamp)
        else:
            self._additional(where, record.offset, "a record was written by no turn", "")

    def _keep(self, where: Where, offset: int, at: int, slot: str = "", turn: int = 0) -> None:
        if self._spool:
            self._spool.keep(where, offset, slot, turn, at)

    def _additional(self, where: Where, offset: int, text: str, turn: str) -> None:
        tally = self.tallies[where[0]]
        tally.additional += 1
        tally.differs(text, self._comparison.place(where, offset), turn)

    # -- one turn

    def judge(self, name: str, replay: ReplayedTurn, pairs: Sequence[EmitPair], ids: Mapping[str, str | int]) -> None:
        number, at = replay.turn["number"], replay.record.timestamp
        places, numbers = self._places(pairs)
        for n, pair in enumerate(pairs):
            where, scope, emit, output, forgotten = pair
            tally = self.tallies.get(where[0])
            if tally is None:
                continue
            turn = f"{name}/{number}"
            if emit is None:
                assert output is not None
                self._additional(where, output.offset, "a record is not among what its turn gives", turn)
                continue
            outgoing = self._comparison.record_of(emit, scope, places, turn.encode())
            ref_place = places.get((scope, emit.ref)) if emit.ref else None
            old_place = ref_place if ref_place and ref_place.offset >= 0 else None
            if output is None:
                if forgotten:
                    tally.forgotten += 1
                else:
                    tally.missing += 1
                    tally.differs(f"a {emit.name} is missing", old_place, turn)
            else:
                place = self._comparison.place(where, output.offset)
                try:
                    difference = self._comparison.difference(outgoing, emit, place, output)
                except StopFolding:
                    self._give_up(pairs[n:], name, number, at)
                    raise
                if difference is None:
                    tally.equal += 1
                    self._keep(where, output.offset, at, name, number)
                    continue
                tally.different += 1
                tally.differs(f"a {emit.name} cannot be read" if difference == UNREADABLE else difference, place, turn)
            if self._spool:
                offset = output.offset if output else old_place.offset if old_place else None
                is_open = any(places[scope, ref].offset < 0 for ref in refs_in(emit.record) if (scope, ref) in places)
                self._spool.make(
                    where,
                    outgoing,
                    offset,
                    name,
                    number,
                    at,
                    number=numbers.get(n, 0),
                    is_open=is_open,
                    replaces=output is not None,
                )
        self._folded[name] = number

    def _give_up(self, pairs: Sequence[EmitPair], name: str, number: int, at: int) -> None:
        """What is left of a turn is not compared."""
        for where, _, _, output, _ in pairs:
            if output is not None and where[0] in self.tallies:
                self.tallies[where[0]].untried += 1
                self._keep(where, output.offset, at, name, number)

    def _places(self, pairs: Sequence[EmitPair]) -> tuple[dict[tuple[int, str], Place], dict[int, int]]:
        """Places by scope and ref: where records lie; where others say that they lay; else, while a topic is made
        again, a number in the place of an offset, which is also given by the number of the pair."""
        places = {
            (scope, emit.ref): self._comparison.place(where, output.offset)
            for where, scope, emit, output, _ in pairs
            if emit and emit.ref and output
        }
        missing = {(p.scope, p.emit.ref): n for n, p in enumerate(pairs) if p.emit and p.emit.ref and not p.output}
        numbers: dict[int, int] = {}
        if missing:
            for key, place in self._places_in_records(pairs, missing).items():
                places[key] = place
        for key, n in missing.items():
            if key not in places and self._spool and pairs[n].where[0] in self.tallies:
                numbers[n], places[key] = self._spool.number(pairs[n].where)
        return places, numbers

    def _places_in_records(
        self, pairs: Sequence[EmitPair], missing: Mapping[tuple[int, str], int]
    ) -> dict[tuple[int, str], Place]:
        """Places of lost records that a record of the same turn names."""
        places: dict[tuple[int, str], Place] = {}
        for where, scope, emit, output, _ in pairs:
            if emit is None or output is None or not any((scope, ref) in missing for ref in refs_in(emit.record)):
                continue
            record = self._bus.fetch([self._comparison.place(where, output.offset)])[0]
            content = self._comparison.decode(record) if record else None
            if content is None or content[0] != emit.name:
                continue
            for ref, place in _places_in(emit, content[1]).items():
                key = scope, ref
                if (
                    key in missing
                    and (place.topic, place.partition) == self._comparison.place(pairs[missing[key]].where, 0)[:2]
                ):
                    places[key] = place
        return places

    # -- the rest

    def end_slot(self, role: str, stage: Stage, slot: int, last: ReplayedTurn | None) -> None:
        """Remember it. The state is no topic that is made again; the audit compares it."""
        self._whole.add(f"{self._names[role]}/{slot}")

    def finish(self) -> None:
        super().finish()
        for slot, where, turn, offset in self._comparison.written.leftovers():
            tally, name = self.tallies.get(where[0]), slot.decode()
            if tally is None:
                continue
            if self._is_additional(name, turn):
                self._additional(where, offset, "a record names a turn that does not exist", f"{name}/{turn}")
                continue
            if name in self._whole:
                tally.later += 1
            else:
                tally.untried += 1
            self._keep(where, offset, 0, name, turn)

    def _is_additional(self, name: str, turn: int) -> bool:
        """Whether a turn that was not folded is none: its slot was folded whole and has not gone on since."""
        if name not in self._whole:
            return False
        stage, _, slot = name.rpartition("/")
        kind = turns_of(self.facts.kind(stage))
        return turn <= self._folded.get(name, -1) or not self.facts.has_moved(kind, int(slot))


def _places_in(emit: Emit, actual: Mapping[str, Any]) -> dict[str, Place]:
    """By ref, the places that a record names where its emit waits for one."""
    places: dict[str, Place] = {}

    def look(pattern: Any, there: Any) -> None:
        if isinstance(pattern, Later):
            if isinstance(there, dict) and there.keys() == set(Place._fields):
                places[pattern.ref] = Place(**there)
        elif isinstance(pattern, Mapping) and isinstance(there, Mapping):
            for key in pattern.keys() & there.keys():
                look(pattern[key], there[key])
        elif isinstance(pattern, list | tuple) and isinstance(there, list | tuple):
            for one, value in zip(pattern, there, strict=False):
                look(one, value)

    look(emit.record, actual)
    return places
