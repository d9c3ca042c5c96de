"""What turns give when they are folded again, beside what lies where they wrote: the comparison itself.

Invariants: outputs of a turn are paired with what it gives in the order of the log, per partition; a record counts as
equal by its bytes, key and headers, or where it says the same behind a claim, in an older release's schema, or beside
a place that is gone. What comes of settings and detectors that no log holds is no difference: it ends the comparison.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import islice
from typing import Any, NamedTuple

from millrace.consumers.audit.facts import Facts
from millrace.consumers.audit.laws.events import REPLACEMENT
from millrace.consumers.audit.turn_outputs import Output, TurnOutputs, Where, digest
from millrace.consumers.audit.walk import Walk
from millrace.infra.errors import ClaimError
from millrace.infra.log.base import Outgoing, Place, Record
from millrace.infra.log.topics import partition_of
from millrace.infra.stages.base import Emit
from millrace.infra.stages.fold import FoldedTurn
from millrace.infra.stages.outbox import Encoding, Outbox, as_record, needs
from millrace.infra.stages.replay import ANYWHERE, is_equal
from millrace.schemas import codec
from millrace.schemas.errors import SchemaError
from millrace.schemas.records import Event

EmitPlaces = Mapping[tuple[int, str], Place]
"""places by the scope and the ref of the emit that lies there"""


UNREADABLE = "it cannot be read"


class StopFolding(Exception):
    """This slot is not folded further; the message is a note."""


class EmitPair(NamedTuple):
    """A record that a turn gives beside the one that lies there; one of both may be missing. `forgotten`: it is of the
    beginning of a topic that retention has taken."""

    where: Where
    scope: int
    emit: Emit | None
    output: Output | None
    forgotten: bool = False


class Refold:
    """Pairs and compares for one walk. `written`: where outputs lie; `rules`: events by the rules and detectors that
    governed them; `count`: partitions of a kind of topic, for one that may be gone."""

    def __init__(self, facts: Facts, walk: Walk, count: Callable[[str], int] | None = None) -> None:
        self._facts, self._walk, self._bus = facts, walk, walk.bus
        self._outbox = Outbox(walk.namespace, largest=1 << 62)
        self._count = count or (lambda kind: len(facts.starts.get(kind, {})))
        self.written = TurnOutputs()
        self.rules: Counter[tuple[str, str]] = Counter()
        self._encodings: dict[int, Encoding] = {}
        """of the turn at hand, by the identity of an emit: what the fold encoded it to"""

    def note_governance(self, event: Event) -> None:
        """Remember what governed an event."""
        if governance := event["governance"]:
            self.rules[governance["policy_version"], governance["redaction_version"]] += 1

    def place(self, where: Where, offset: int) -> Place:
        """An offset of a partition as a place."""
        return Place(self._walk.full[where[0]], where[1], offset)

    # -- pairs

    def pairs(self, slot: str, turn: int, fold: FoldedTurn) -> list[EmitPair]:
        """What a turn of a slot (`stage/slot`) gives beside what lies there. Call it with rising turns."""
        emits = fold.emits
        self._encodings = {id(emit): data for (_, emit), data in zip(emits, fold.encodings, strict=True)}
        emits_at: dict[Where, list[tuple[int, Emit]]] = {}
        for scope, emit in emits:
            if self._facts.is_ours(emit.topic):
                emits_at.setdefault(self._where(emit), []).append((scope, emit))
        holes = {where for where in emits_at if self._is_lost(slot.encode(), where)}
        outputs_at = self.written.take(slot.encode(), turn)
        header = f"{slot}/{turn}".encode()
        pairs: list[EmitPair] = []
        places: dict[tuple[int, str], Place] = {}

        def names_others(where: Where) -> bool:
            return any(needs(self._encodings[id(emit)]) for _, emit in emits_at.get(where, ()))

        for where in sorted({*emits_at, *outputs_at}, key=lambda where: (names_others(where), where)):
            gives, there = emits_at.get(where, []), outputs_at.get(where, [])
            if len(there) < len(gives) and where in holes:
                older = len(gives) - len(there)
                pairs += (EmitPair(where, scope, emit, None, forgotten=True) for scope, emit in gives[:older])
                gives = gives[older:]
            pairs_here = list(self._align(where, gives, there, places, header))
            places |= {
                (p.scope, p.emit.ref): self.place(where, p.output.offset) for p in pairs_here if p.emit and p.output
            }
            pairs += pairs_here
        return sorted(pairs, key=lambda pair: pair.where)

    def _is_lost(self, slot: bytes, where: Where) -> bool:
        """Whether a slot's next record in a partition may be older than what is kept of it."""
        return self.written.is_untouched(slot, where) and self._facts.starts.get(where[0], {}).get(where[1], 0) > 0

    def _where(self, emit: Emit) -> Where:
        kind = self._facts.kind(emit.topic)
        if emit.partition is not None:
            return kind, emit.partition
        return kind, partition_of(emit.key, max(1, self._count(kind)))

    def _align(
        self,
        where: Where,
        gives: Sequence[tuple[int, Emit]],
        there: Sequence[Output],
        places: EmitPlaces,
        header: bytes,
    ) -> Iterator[EmitPair]:
        """Each emit with the output in its place. Where they are not as many, equal ones keep together, so that what is
        missing or additional is that and no other."""
        anchors = [] if len(gives) == len(there) else _common([self._digest(*e, places, header) for e in gives], there)
        at = there_at = 0
        for here, yonder in [*anchors, (len(gives), len(there))]:
            for n in range(max(here - at, yonder - there_at)):
                scope, emit = gives[at + n] if at + n < here else (-1, None)
                yield EmitPair(where, scope, emit, there[there_at + n] if there_at + n < yonder else None)
            if here < len(gives):
                yield EmitPair(where, *gives[here], there[yonder])
            at, there_at = here + 1, yonder + 1

    def _digest(self, scope: int, emit: Emit, places: EmitPlaces, header: bytes) -> int | None:
        """Of the record that an emit becomes; None where that depends on places that are not known."""
        if any((scope, ref) not in places for ref in needs(self._encodings[id(emit)])):
            return None
        outgoing = self.record_of(emit, scope, places, header)
        return digest(outgoing.key, outgoing.headers, outgoing.value)

    # -- one record

    def record_of(self, emit: Emit, scope: int, places: EmitPlaces, header: bytes) -> Outgoing:
        """The record that an emit becomes, with the places that are known in it."""
        data = self._encodings[id(emit)]
        place_of_ref = {
            ref: as_record(places[scope, ref]) if (scope, ref) in places else ANYWHERE for ref in needs(data)
        }
        return self._outbox.encode(emit, data, header, place_of_ref)

    def difference(self, outgoing: Outgoing, emit: Emit, place: Place, output: Output) -> str | None:
        """How the record at a place differs from the one that its turn gives, in words that quote nothing: UNREADABLE
        for one that is none, None for an equal one. Raises Stop."""
        if digest(outgoing.key, outgoing.headers, outgoing.value) == output.digest:
            return None
        record = self._bus.fetch([place])[0]
        if record is None:
            return "a record went while the turn that wrote it was folded again"
        beside = record.key != outgoing.key or dict(record.headers) != dict(outgoing.headers)
        record_there = self.decode(record)
        if record_there is None:
            return UNREADABLE
        name, log_record = record_there
        fold_record = codec.decode_by_name(emit.name, outgoing.value or b"")
        if beside:
            if name == emit.name:
                self._excuse(emit, fold_record, log_record)
            return f"a {emit.name} has another key or other headers than its turn gives it"
        if name == emit.name and is_equal(fold_record, log_record):
            return None  # behind a claim, written by an older release, or beside a place that is gone
        self._excuse(emit, fold_record, log_record)
        fields = ", ".join(field_differences(fold_record, log_record)) if name == emit.name else "kind of record"
        return f"a {emit.name} differs from what its turn gives when folded again: {fields}"

    def decode(self, record: Record) -> tuple[str, dict[str, Any]] | None:
        """A record, that behind its claim where it is one; None for what cannot be read."""
        try:
            return codec.decode(self._walk.resolve(record).value or b"")
        except (ClaimError, SchemaError):
            return None

    def _excuse(self, emit: Emit, fold_record: Mapping[str, Any], log_record: Mapping[str, Any]) -> None:
        """Raises Stop where a difference comes from what no log holds: settings that were changed, a detector that
        failed. Nothing after it can be compared, since the state differs from there on."""
        rules_here, rules_there = fold_record.get("governance"), log_record.get("governance")
        if emit.name == "Event" and rules_here and rules_there:
            rules = (rules_there["policy_version"], rules_there["redaction_version"])
            # Rules that were in force governed more than one event: one that stands alone was altered.
            if rules != (rules_here["policy_version"], rules_here["redaction_version"]) and self.rules[rules] > 1:
                raise StopFolding(
                    "is folded again up to where other detectors or rules governed it than are configured here"
                )
            # Where a detector fails, the text goes: a body with all of it had none that failed.
            has_lost_text = fold_record["body"] != log_record["body"] or rules_there["eligibility"] == "denied"
            if (rules_here["redaction"] == "failed") != (rules_there["redaction"] == "failed") and has_lost_text:
                raise StopFolding("is folded again up to where a detector failed, which no fold repeats")
        if emit.name in ("Event", "DeadLetter") and any(
            REPLACEMENT.fullmatch(str(value))
            and REPLACEMENT.fullmatch(str(log_record[name]))
            and value != log_record[name]
            for name, value in fold_record.items()
        ):
            raise StopFolding(
                "is folded again up to where names were replaced under another key than the one given here"
            )
        fields = set(field_differences(fold_record, log_record))
        if emit.name == "Grant" and fields and fields <= {"awaits", "reward_deadline_ms"}:
            facts = self._facts
            wait, awaits = log_record["reward_deadline_ms"], tuple(log_record["awaits"])
            # A change of settings stays: what one prompt alone shows was altered. Prompts that name sources need none.
            has_common_wait = wait == fold_record["reward_deadline_ms"] or facts.waits[wait] > 1
            names_sources = log_record["prompt_id"] in facts.asking
            has_common_sources = list(awaits) == fold_record["awaits"] or (
                not names_sources and len(facts.awaited[awaits]) > 1
            )
            if has_common_wait and has_common_sources:
                raise StopFolding("is folded again up to where [policy] awaits or reward_deadline_s were changed")


def _common(gives: Sequence[int | None], there: Sequence[Output]) -> list[tuple[int, int]]:
    """Positions of digests that both hold, in one order."""
    blocks = SequenceMatcher(None, gives, [output.digest for output in there], autojunk=False).get_matching_blocks()
    return [(a + n, b + n) for a, b, size in blocks for n in range(size)]


FIELD_LIMIT = 5


def field_differences(fold_value: Any, log_value: Any) -> list[str]:
    """Paths of the first few fields that differ: `rewards[0].value`."""
    return list(islice(_paths(fold_value, log_value, ""), FIELD_LIMIT))


def _paths(fold_value: Any, log_value: Any, at: str) -> Iterator[str]:
    if fold_value == ANYWHERE:
        return
    if isinstance(fold_value, dict) and isinstance(log_value, dict) and fold_value.keys() == log_value.keys():
        for key, value in fold_value.items():
            yield from _paths(value, log_value[key], f"{at}.{key}" if at else key)
    elif isinstance(fold_value, list) and isinstance(log_value, list) and len(fold_value) == len(log_value):
        for n, (fold_item, log_item) in enumerate(zip(fold_value, log_value, strict=True)):
            yield from _paths(fold_item, log_item, f"{at}[{n}]")
    elif fold_value != log_value and (fold_value == fold_value or log_value == log_value):
        yield at or "all of it"
