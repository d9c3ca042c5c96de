"""The law that stages did what they are: every turn folded again, by the production stages, and compared.

Invariants: a turn's inputs, their order and its clock come from its own record; each output is compared with the record
that lies where the turn wrote it, bytes, key and headers, and the places inside it with the places of what it names;
after the last turn the state is compared with the changelog. What cannot be folded again is a note: turns or inputs
that retention has taken, and what depends on more than the log (a detector that failed, rules that were changed).
One slot's state is in memory at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from millrace.consumers.audit.differs import differing
from millrace.consumers.audit.envelopes import REPLACED
from millrace.consumers.audit.facts import Facts
from millrace.consumers.audit.law import Law
from millrace.consumers.audit.rows import Mark, Row
from millrace.consumers.audit.walk import Walk
from millrace.consumers.audit.written import Output, Where, Written, digest
from millrace.infra.errors import ClaimError, InputGone, MillraceError
from millrace.infra.log.base import Outgoing, Place, Record
from millrace.infra.log.topics import changelog_of, full_name, partition_of, stages_of, turns_of
from millrace.infra.stages.base import Emit, Stage
from millrace.infra.stages.outbox import Outbox, as_record, filled, refs_in
from millrace.infra.stages.replay import ANYWHERE, Refolded, refold, same
from millrace.infra.stages.state import State
from millrace.schemas import codec
from millrace.schemas.errors import SchemaError
from millrace.schemas.records import Event

Makers = Mapping[str, Callable[[Facts], Stage]]
"""by role: what makes the stage that folds again, from what the log says was in force"""
ENOUGH = 20
"""violations of one slot after which it is not folded further: one difference brings others with it"""


class Stop(Exception):
    """This slot is not folded further; the message is a note."""


class Folds(Law):
    """Refold of every slot of every stage that was given. Not one of the plain laws: it reads its inputs again."""

    name = "folds"
    sentence = "every turn folded again gives the records that it wrote, and at the end the state of its changelog"
    unit = "records"

    def __init__(self, facts: Facts, walk: Walk, makers: Makers) -> None:
        super().__init__(facts)
        self._walk, self._bus, self._makers = walk, walk.bus, makers
        self._written = Written()
        self._names = stages_of(facts.policy)
        self._outbox = Outbox(walk.namespace, largest=1 << 62)
        self._turns = 0
        self._rules: Counter[tuple[str, str]] = Counter()
        """events by the rules and detectors that governed them"""

    def event(self, row: Row[Event]) -> None:
        governance = row["governance"] if row.name == "Event" else None
        if governance is not None:
            self._rules[governance["policy_version"], governance["redaction_version"]] += 1

    def record(self, kind: str, record: Record) -> None:
        self._written.add(kind, record)

    def finish(self) -> None:
        for role, make in self._makers.items():
            kind = turns_of(role)
            try:
                stage = make(self.facts)
            except MillraceError as error:
                self.note(f"{role} is not folded again: {error}")
                continue
            for slot in self._walk.partitions(kind):
                if self.facts.starts[kind][slot]:
                    self.note(f"{role}[{slot}] is not folded again: retention has taken its first turns")
                elif self._walk.ends[kind][slot]:
                    self._slot(role, stage, slot)
        self.finding.facts["turns"] = self._turns

    # -- one slot

    def _slot(self, role: str, stage: Stage, slot: int) -> None:
        before, last = self.finding.broken, None
        end = self._walk.ends[turns_of(role)][slot]
        try:
            for last in refold(self._bus, stage, self._walk.namespace, slot, end):
                self._walk.watch(f"folding {role}[{slot}] again", last.record.offset + 1, end)
                self._turn(role, slot, last)
                if self.finding.broken - before > ENOUGH:
                    raise Stop(f"differs in more than {ENOUGH} places: the rest of its turns was not folded again")
            if last is not None and self.finding.broken == before:
                self._changelog(role, stage, slot, last)
        except Stop as stop:
            self.note(f"{role}[{slot}] {stop}")
        except InputGone as error:
            self._gone(role, slot, last, error)
        except Exception as error:  # a stage may raise anything when it is given what it was never given
            shown = [last.record.place] if last else []
            self.fail(f"{role}[{slot}] cannot be folded again: {type(error).__name__}: {error}", *shown)

    def _gone(self, role: str, slot: int, last: Refolded | None, error: InputGone) -> None:
        """A note where retention explains it, else a violation at the turn behind the last that could be folded."""
        number = last.turn["number"] + 1 if last else 0
        record = self._record_of(role, slot, last.record.offset + 1 if last else 0)
        spans = codec.decode_as("Turn", record.value or b"")["ranges"] if record else []
        for span in spans:
            kind = self.facts.kind(span["topic"])
            if 0 <= span["first"] < self.facts.starts.get(kind, {}).get(span["partition"], 0):
                self.note(f"{role}[{slot}] is folded again up to turn {number}: retention has taken what came in then")
                return
        self.fail(str(error), *([record.place] if record else []), stage=role, slot=slot, turn=number)

    def _record_of(self, role: str, slot: int, offset: int) -> Record | None:
        return next(iter(self._bus.read(self._walk.full[turns_of(role)], slot, offset)), None)

    # -- one turn

    def _turn(self, role: str, slot: int, again: Refolded) -> None:
        turn, folded = again.turn, again.folded
        ids: dict[str, str | int] = {"stage": role, "slot": slot, "turn": turn["number"]}
        mark = Mark(again.record.place, again.record.timestamp)
        self._turns += 1
        for field, was, now in again.differences():
            self.fail(f"a turn says {field} {_short(was)}; folded again it is {_short(now)}", mark, **ids)
        counts: dict[str, int] = {}
        emits: dict[Where, list[tuple[int, Emit]]] = {}
        for scope, emit in folded.emits:
            counts[emit.topic] = counts.get(emit.topic, 0) + 1
            if self.facts.mine(emit.topic):
                emits.setdefault(self._where(emit), []).append((scope, emit))
        if counts != turn["emitted"]:
            self.fail("a turn counts other outputs than it gives when folded again", mark, **ids)
        name = f"{self._names[role]}/{slot}"
        untouched = {where: self._written.untouched(name.encode(), where) for where in emits}
        found = self._written.take(name.encode(), turn["number"])
        pairs = list(self._paired(emits, found, untouched, mark, ids))
        places = {(s, emit.ref): self._place(where, output) for where, s, emit, output in pairs if emit.ref}
        header = f"{name}/{turn['number']}".encode()
        for where, scope, emit, output in pairs:
            self.finding.checked += 1
            self._compare(
                self._expected(emit, scope, places, header), emit, self._place(where, output), output, mark, ids
            )

    def _where(self, emit: Emit) -> Where:
        kind = self.facts.kind(emit.topic)
        if emit.partition is not None:
            return kind, emit.partition
        return kind, partition_of(emit.key, max(1, len(self.facts.starts.get(kind, {}))))

    def _place(self, where: Where, output: Output) -> Place:
        return Place(self._walk.full[where[0]], where[1], output.offset)

    def _paired(
        self,
        emits: Mapping[Where, Sequence[tuple[int, Emit]]],
        found: Mapping[Where, Sequence[Output]],
        untouched: Mapping[Where, bool],
        mark: Mark,
        ids: dict[str, str | int],
    ) -> Iterator[tuple[Where, int, Emit, Output]]:
        """Each emit with the record that it became. What is missing on either side is a violation, except at the lost
        beginning of a topic."""
        for where in sorted({*emits, *found}):
            wanted, there = emits.get(where, ()), found.get(where, ())
            lost = untouched.get(where, False) and self.facts.starts.get(where[0], {}).get(where[1], 0) > 0
            if len(there) < len(wanted) and lost:
                wanted = wanted[len(wanted) - len(there) :]
            for (scope, emit), output in zip(wanted, there, strict=False):
                yield where, scope, emit, output
            spot = f"{where[0]}[{where[1]}]"
            if len(there) < len(wanted):
                count = len(wanted) - len(there)
                self.fail(f"folded again, a turn gives {count} more records for {spot} than lie there", mark, **ids)
            for output in there[len(wanted) :]:
                message = f"a record of {spot} is not among what its turn gives when folded again"
                self.fail(message, self._place(where, output), mark, **ids)

    def _expected(self, emit: Emit, scope: int, places: Mapping[tuple[int, str], Place], header: bytes) -> Outgoing:
        refs = set(refs_in(emit.record))
        known = {ref: as_record(places[scope, ref]) if (scope, ref) in places else ANYWHERE for ref in refs}
        return self._outbox.encode(emit, filled(emit.record, known) if refs else emit.record, header)

    def _compare(
        self, wanted: Outgoing, emit: Emit, place: Place, output: Output, mark: Mark, ids: dict[str, str | int]
    ) -> None:
        if digest(wanted.key, wanted.headers, wanted.value) == output.digest:
            return
        record = self._bus.fetch([place])[0]
        if record is None:
            self.fail("a record went while the turn that wrote it was folded again", place, mark, **ids)
            return
        beside = record.key != wanted.key or dict(record.headers) != dict(wanted.headers)
        try:
            stored = self._walk.resolve(record).value or b""
            name, actual = codec.decode(stored)
        except (ClaimError, SchemaError):
            return  # the law about records names it
        expected = codec.decode_named(emit.name, wanted.value or b"")
        if beside:
            if name == emit.name:
                self._excuse(emit, expected, actual)
            self.fail(f"a {emit.name} has another key or other headers than its turn gives it", place, mark, **ids)
            return
        if name == emit.name and same(expected, actual):
            return  # behind a claim, written by an older release, or beside a place that is gone
        self._excuse(emit, expected, actual)
        fields = ", ".join(differing(expected, actual)) if name == emit.name else "kind of record"
        message = f"a {emit.name} differs from what its turn gives when folded again: {fields}"
        self.fail(message, Mark(place, record.timestamp), mark, **ids)

    def _excuse(self, emit: Emit, expected: Mapping[str, Any], actual: Mapping[str, Any]) -> None:
        """Raises Stop where a difference comes from what no log holds: settings that were changed, a detector that
        failed. Nothing after it can be compared, since the state differs from there on."""
        mine, theirs = expected.get("governance"), actual.get("governance")
        if emit.name == "Event" and mine and theirs:
            rules = (theirs["policy_version"], theirs["redaction_version"])
            # Rules that were in force governed more than one event: one that stands alone was altered.
            if rules != (mine["policy_version"], mine["redaction_version"]) and self._rules[rules] > 1:
                raise Stop("is folded again up to where other detectors or rules governed it than are configured here")
            # Where a detector fails, the text goes: a body with all of it had none that failed.
            gone = expected["body"] != actual["body"] or theirs["eligibility"] == "denied"
            if (mine["redaction"] == "failed") != (theirs["redaction"] == "failed") and gone:
                raise Stop("is folded again up to where a detector failed, which no fold repeats")
        if emit.name in ("Event", "DeadLetter") and any(
            REPLACED.fullmatch(str(value)) and REPLACED.fullmatch(str(actual[name])) and value != actual[name]
            for name, value in expected.items()
        ):
            raise Stop("is folded again up to where names were replaced under another key than the one given here")
        other = set(differing(expected, actual))
        if emit.name == "Grant" and other and other <= {"awaits", "reward_deadline_ms"}:
            wait, awaits = actual["reward_deadline_ms"], tuple(actual["awaits"])
            # A change of settings stays: what one prompt alone shows was altered. Prompts that name sources need none.
            waited = wait == expected["reward_deadline_ms"] or self.facts.waits[wait] > 1
            named = actual["prompt_id"] in self.facts.asking
            awaited = list(awaits) == expected["awaits"] or (not named and len(self.facts.awaited[awaits]) > 1)
            if waited and awaited:
                raise Stop("is folded again up to where [policy] awaits or reward_deadline_s were changed")

    # -- the state

    def _changelog(self, role: str, stage: Stage, slot: int, last: Refolded) -> None:
        """Every turn writes a turn record, so while their end stands still the changelog does too."""
        end, log = self._walk.ends[turns_of(role)][slot], full_name(self._walk.namespace, changelog_of(stage.name))
        kept = State.restore(slot, self._bus.read(log, slot)).snapshot()
        if self._bus.written(self._walk.full[turns_of(role)])[slot] != end:
            self.note(f"{role}[{slot}] goes on writing: its changelog was not compared")
            return
        now, mark = last.state.snapshot(), Mark(last.record.place, last.record.timestamp)
        for part in kept:
            for key in sorted({*kept[part], *now[part]}):
                if kept[part].get(key) != now[part].get(key):
                    message = f"the changelog of {role}[{slot}] holds other {part} under {key!r} than its turns give"
                    self.fail(message, mark, stage=role, slot=slot, turn=last.turn["number"])
                    return


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
