"""The law that stages did what they are: every turn folded again, by the production stages, and compared.

Invariants: a turn's inputs, their order and its clock come from its own record; each output is compared with the record
that lies where the turn wrote it, bytes, key and headers, and the places inside it with the places of what it names;
after the last turn the state is compared with the changelog. What cannot be folded again is a note: turns or inputs
that retention has taken, and what depends on more than the log (a detector that failed, rules that were changed).
One slot's state is in memory at a time.

A stage's settings come from where they are recorded: dispatch's from the settings that it wrote as the policy began and
from its first grant, seal's from `decisions`. Refine's rules and detectors are those configured here; the audit says so
where a history was governed by others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from millrace.consumers.audit.facts import Facts
from millrace.consumers.audit.law import Law
from millrace.consumers.audit.refold import UNREADABLE, EmitPair, Refold, StopFolding
from millrace.consumers.audit.turn_outputs import Where
from millrace.consumers.audit.walk import Walk
from millrace.infra.config import Settings
from millrace.infra.connect import claims
from millrace.infra.errors import InputGone, MillraceError, ReplayError, StorageError, UnreachableError
from millrace.infra.log.base import Record
from millrace.infra.log.history.rows import Mark, Row
from millrace.infra.log.readable import readable
from millrace.infra.log.topics import changelog_of, full_name, stages_of, turns_of
from millrace.infra.stages.base import Stage
from millrace.infra.stages.replay import ReplayedTurn, refold
from millrace.infra.stages.state import SlotState
from millrace.schemas.records import Event, Turn
from millrace.streams.dispatch.stage import Dispatch, Terms
from millrace.streams.refine.detectors.guard import GuardedDetectors
from millrace.streams.refine.detectors.rule_cache import keep_rules
from millrace.streams.refine.names import FILE
from millrace.streams.serve import DETECTORS, dispatch_terms, refine_of, seal_of

Makers = Mapping[str, Callable[[Facts], Stage]]
"""by role: what makes the stage that folds again, from what the log says was in force"""
ENOUGH = 20
"""violations of one slot after which it is not folded further: one difference brings others with it"""


class Folds(Law):
    """Refold of every slot of every stage that was given. Not one of the plain laws: it reads its inputs again."""

    name = "folds"
    sentence = "every turn folded again gives the records that it wrote, and at the end the state of its changelog"
    unit = "records"

    def __init__(self, facts: Facts, walk: Walk, makers: Makers) -> None:
        super().__init__(facts)
        self._walk, self._bus, self._makers = walk, walk.bus, makers
        self._comparison = Refold(facts, walk)
        self._names = stages_of(facts.policy)
        self._turns = 0

    def event(self, row: Row[Event]) -> None:
        if row.name == "Event":
            self._comparison.note_governance(row.record)

    def record(self, kind: str, record: Record) -> None:
        self._comparison.written.add(kind, record)

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
                else:
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
                    raise StopFolding(
                        f"differs in more than {ENOUGH} places: the rest of its turns was not folded again"
                    )
            self.end_slot(role, stage, slot, last if self.finding.broken == before else None)
        except StopFolding as stop:
            self.note(f"{role}[{slot}] {stop}")
        except InputGone as error:
            self._report_gap(role, slot, last, error)
        except (UnreachableError, StorageError):
            raise  # a log that does not answer shows nothing of what lies in it
        except Exception as error:  # a stage may raise anything when it is given what it was never given
            places = [last.record.place] if last else []
            self.fail(f"{role}[{slot}] cannot be folded again: {type(error).__name__}: {error}", *places)

    def _report_gap(self, role: str, slot: int, last: ReplayedTurn | None, error: InputGone) -> None:
        """A note where retention explains it, else a violation at the turn behind the last that could be folded."""
        number = last.turn["number"] + 1 if last else 0
        record = self._record_of(role, slot, last.record.offset + 1 if last else 0)
        turn = readable(Turn, record) if record else None
        for span in turn["ranges"] if turn else []:
            kind = self.facts.kind(span["topic"])
            if 0 <= span["first"] < self.facts.starts.get(kind, {}).get(span["partition"], 0):
                self.note(f"{role}[{slot}] is folded again up to turn {number}: retention has taken what came in then")
                return
        self.fail(str(error), *([record.place] if record else []), stage=role, slot=slot, turn=number)

    def _record_of(self, role: str, slot: int, offset: int) -> Record | None:
        return next(iter(self._bus.read(self._walk.full[turns_of(role)], slot, offset)), None)

    # -- one turn

    def _turn(self, role: str, slot: int, replay: ReplayedTurn) -> None:
        turn, fold = replay.turn, replay.folded
        ids: dict[str, str | int] = {"stage": role, "slot": slot, "turn": turn["number"]}
        mark = Mark(replay.record.place, replay.record.timestamp)
        self._turns += 1
        for field, was, now in replay.differences():
            self.fail(f"a turn says {field} {_excerpt(was)}; folded again it is {_excerpt(now)}", mark, **ids)
        counts = Counter(emit.topic for _, emit in fold.emits)
        if counts != turn["emitted"]:
            self.fail("a turn counts other outputs than it gives when folded again", mark, **ids)
        name = f"{self._names[role]}/{slot}"
        self.judge(name, replay, self._comparison.pairs(name, turn["number"], fold), ids)

    def judge(self, name: str, replay: ReplayedTurn, pairs: Sequence[EmitPair], ids: Mapping[str, str | int]) -> None:
        """All that a turn gives and all that lies there. Raises Stop."""
        mark, header = Mark(replay.record.place, replay.record.timestamp), f"{name}/{replay.turn['number']}".encode()
        missing: Counter[Where] = Counter()
        comparison = self._comparison
        places = {
            (scope, emit.ref): comparison.place(where, output.offset)
            for where, scope, emit, output, _ in pairs
            if emit and emit.ref and output
        }
        for where, scope, emit, output, forgotten in pairs:
            if output is None:
                missing[where] += not forgotten
                continue
            place = comparison.place(where, output.offset)
            if emit is None:
                message = f"a record of {where[0]}[{where[1]}] is not among what its turn gives when folded again"
                self.fail(message, place, mark, **ids)
                continue
            self.finding.checked += 1
            difference = comparison.difference(comparison.record_of(emit, scope, places, header), emit, place, output)
            if difference not in (None, UNREADABLE):  # the law about records names what cannot be read
                self.fail(difference, place, mark, **ids)
        for (kind, partition), count in missing.items():
            if count:
                text = f"folded again, a turn gives {count} more records for {kind}[{partition}] than lie there"
                self.fail(text, mark, **ids)

    # -- the state

    def end_slot(self, role: str, stage: Stage, slot: int, last: ReplayedTurn | None) -> None:
        """All turns of a slot were folded, and with `last` none differs. Every turn writes a turn record, so while
        their end stands still the changelog does too."""
        if last is None:
            return
        end, log = self._walk.ends[turns_of(role)][slot], full_name(self._walk.namespace, changelog_of(stage.name))
        changelog = SlotState.restore(slot, self._bus.read(log, slot)).snapshot()
        if self._bus.log_ends(self._walk.full[turns_of(role)])[slot] != end:
            self.note(f"{role}[{slot}] goes on writing: its changelog was not compared")
            return
        now, mark = last.state.snapshot(), Mark(last.record.place, last.record.timestamp)
        for part in changelog:
            for key in sorted({*changelog[part], *now[part]}):
                if changelog[part].get(key) != now[part].get(key):
                    message = f"the changelog of {role}[{slot}] holds other {part} under {key!r} than its turns give"
                    self.fail(message, mark, stage=role, slot=slot, turn=last.turn["number"])
                    return


def _excerpt(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def production(settings: Settings, stack: ExitStack) -> Makers:
    """Makers of the three stages. The detectors run in a process of their own, which ends with `held`."""

    def refine(facts: Facts) -> Stage:
        if not facts.begins_at_zero("raw"):
            raise ReplayError("retention has taken the beginning of raw")
        if not settings.governance.name_key.get_secret_value() and not (settings.home / FILE).exists():
            raise ReplayError(
                f"the key under which names are replaced is not in {settings.home}: audit where refine runs, or set"
                " [governance] name_key"
            )
        keep_rules(settings.home)
        detectors = GuardedDetectors(DETECTORS)
        stack.callback(detectors.close)
        return refine_of(settings, detectors, claims(settings))

    return {
        "refine": refine,
        "seal": lambda facts: seal_of(settings, claims(settings)),
        "dispatch": lambda facts: dispatch(settings, facts),
    }


def dispatch(settings: Settings, facts: Facts) -> Dispatch:
    """The dispatch stage under the terms that it began with, as far as the log says them."""
    began, terms = facts.began, dispatch_terms(settings)
    terms = Terms(
        release=began.get("release", terms.release),
        unsolicited_share=began.get("unsolicited_share", terms.unsolicited_share),
        lease=began["lease_ms"] * 1000 if "lease_ms" in began else terms.lease,
        reward_deadline_ms=next(iter(facts.waits), terms.reward_deadline_ms),
        awaits=next(iter(facts.awaited), terms.awaits),
        max_running=began.get("max_running", terms.max_running),
        dynamic_sampling=began.get("dynamic_sampling", terms.dynamic_sampling),
    )
    return Dispatch(facts.policy, len(facts.starts["grants"]), terms, claims(settings))
