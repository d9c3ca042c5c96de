"""Reads every topic of one policy once, in a fixed order, and hands each record to the laws.

Invariants: only committed records are read, up to ends that were taken so that what a live system appends meanwhile
never looks like a violation (`history.extent`); one record is held at a time, and of trajectories one batch with the
model calls they name.

Order: weights, ledger, scores, decisions, prompts, resolutions, grants, completions, trajectories, evaluations, turns,
dead letters, then per partition raw and events side by side. So a law knows all that was decided when it sees what it
was decided about.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TypeAlias

from millrace.consumers.audit.law import SealedSample
from millrace.infra.errors import AuditError, ClaimError
from millrace.infra.log.base import Bus, Place, Record
from millrace.infra.log.history.extent import Extent
from millrace.infra.log.history.kinds import TURNS
from millrace.infra.log.history.reader import History, Stretch, Unreadable, left_out
from millrace.infra.log.history.rows import Resolve, Row
from millrace.schemas.errors import SchemaError

if TYPE_CHECKING:
    from millrace.consumers.audit.facts import Facts
    from millrace.consumers.audit.law import Law

TELL_EVERY = 200
BATCH = 64
"""trajectories whose model calls are fetched together"""

Watch = Callable[[str, int, int], None]
"""is told what is being done, how far it is, and where that ends"""
Taker: TypeAlias = "tuple[Law, Callable[..., None]]"
"""a law and its method for a kind of row"""


class Walk:
    """One reading of the topics. `starts` and `ends` are by kind of topic and partition."""

    def __init__(self, bus: Bus, namespace: str, policy: str, resolve: Resolve, watch: Watch = lambda *_: None) -> None:
        """Raises AuditError when the policy has no topic of weights."""
        self.history = History(bus, namespace, policy, resolve)
        self.bus = bus
        self.namespace = namespace
        self.watch = watch
        self.policy = policy
        self.resolve = resolve
        self.full = self.history.names
        self.extent = Extent(self.history)
        self.starts, self.ends = self.extent.starts, self.extent.ends
        self.counts: Counter[str] = Counter()
        self.notes = self.extent.notes
        if not self.starts.get("weights"):
            raise AuditError(
                f"there is no topic {self.full['weights']}: check [policy] name and the namespace, or create the policy"
            )

    def partitions(self, kind: str) -> list[int]:
        return sorted(self.starts[kind])

    def records(self, kind: str, partition: int) -> Iterator[Record]:
        """Committed records of one partition up to the measured end."""
        start, end = self.starts[kind][partition], self.ends[kind][partition]
        for record in self.history.records(kind, partition, Stretch(start, end)):
            self.counts[kind] += 1
            if not self.counts[kind] % TELL_EVERY:
                self.watch(f"reading {kind}[{partition}]", record.offset - start, end - start)
            yield record
        self.watch(f"reading {kind}[{partition}]", end - start, end - start)

    def run(self, facts: Facts, laws: Sequence[Law]) -> None:
        """Walk once: the facts see what they ask for first, then every law; at the end the laws finish."""
        learn: dict[str, Callable[[Row[Any]], None]]
        learn = {"weights": facts.weights, "ledger": facts.ledger, "resolutions": facts.resolution}
        learn |= {"prompts": facts.prompt, "grants": facts.grant}
        for kind in ("weights", "ledger", "scores", "decisions", "prompts", "resolutions", "grants", "completions"):
            self._feed(kind, laws, learn.get(kind))
        self._samples(laws)
        for kind in ("evaluations", *TURNS, "dead-letters"):
            self._feed(kind, laws)
        for partition in sorted({*self.partitions("events"), *self.partitions("raw")}):
            self._slot(partition, laws)
        for law in laws:
            law.finish()

    def _slot(self, partition: int, laws: Sequence[Law]) -> None:
        """Raw and events of one partition side by side: each event right after the raw event that it names."""
        raw_takers, event_takers = takers(laws, "raw"), takers(laws, "event")
        raw = self._rows("raw", partition, laws)
        ahead = next(raw, None)
        for row in self._rows("events", partition, laws):
            source = row["source_place"] if row.name == "Event" else None
            while source and ahead is not None and ahead.place.offset <= source["offset"]:
                tell(raw_takers, ahead)
                ahead = next(raw, None)
            tell(event_takers, row)
        for row in chain([ahead] if ahead else [], raw):
            tell(raw_takers, row)
        for law in laws:
            law.slot_end(partition)

    def _rows(self, kind: str, partition: int, laws: Sequence[Law]) -> Iterator[Row]:
        """Decoded records of one partition; every law that asks sees the records first."""
        seers = [see for _, see in takers(laws, "record")]
        if partition not in self.starts[kind]:
            return
        unreadable = unreadable_to(laws)
        for record in self.records(kind, partition):
            for see in seers:
                see(kind, record)
            row = self.history.row(kind, record, unreadable)
            if row is not None:
                yield row

    def _feed(self, kind: str, laws: Sequence[Law], learn: Callable[[Row], None] | None = None) -> None:
        kind_takers = takers(laws, handler(kind))
        for partition in self.partitions(kind):
            for row in self._rows(kind, partition, laws):
                if learn is not None:
                    self._learn(learn, row, laws)
                tell(kind_takers, row)

    def _learn(self, learn: Callable[[Row], None], row: Row, laws: Sequence[Law]) -> None:
        """The facts take in a row; one that nothing can be learned from is unreadable."""
        try:
            learn(row)
        except (ValueError, TypeError, LookupError) as error:
            for law in laws:
                law.unreadable(row.kind, row.raw, f"{type(error).__name__}: {error}")

    def latest(self, kind: str) -> Row | None:
        """The last readable record of a kind that was committed since its end was measured; None without one."""
        row = None
        for partition in self.partitions(kind):
            for record in self.history.records(kind, partition, Stretch(self.ends[kind][partition])):
                row = self.history.row(kind, record, left_out) or row
        return row

    def has_moved(self, kind: str, partition: int) -> bool:
        """Whether anything, decided or not, was written to a partition since its end was taken."""
        return self.extent.has_moved(kind, partition)

    def _samples(self, laws: Sequence[Law]) -> None:
        sample_takers = takers(laws, "trajectory")
        for partition in self.partitions("trajectories"):
            rows = self._rows("trajectories", partition, laws)
            if not sample_takers:
                deque(rows, maxlen=0)
            while batch := list(islice(rows, BATCH)):
                for sample in self._with_calls(batch, laws):
                    tell(sample_takers, sample)

    def _with_calls(self, rows: Sequence[Row], laws: Sequence[Law]) -> Iterator[SealedSample]:
        """Samples with the events they name; None stands where nothing (readable) lies."""
        places_of_rows = [row.places("events") for row in rows]
        there = [place for places in places_of_rows for place in places if self._exists(place)]
        records = dict(zip(there, self.bus.fetch(there), strict=True))
        for row, places in zip(rows, places_of_rows, strict=True):
            calls = [self._call(record) if (record := records.get(place)) else None for place in places]
            sample = SealedSample(row, places, calls)
            try:
                _ = sample.traces
            except SchemaError as error:
                for law in laws:
                    law.unreadable("trajectories", row.raw, str(error))
            else:
                yield sample

    def _exists(self, place: Place) -> bool:
        """Whether a place can be looked at: what is forged may name any topic."""
        return place.topic == self.full["events"] and place.partition in self.ends["events"] and place.offset >= 0

    def _call(self, record: Record) -> Row | None:
        """A model call whose body can be read. What cannot is named where `events` are walked."""
        row = self.history.row("events", record, left_out)
        try:
            fits = row is not None and row.name == "Event" and row["kind"] == "model_call"
            return row if row is not None and fits and row.body else None
        except SchemaError:
            return None


HANDLERS = {"ledger": "ledger", "raw": "raw", "weights": "weights", "dead-letters": "dead_letter"}


def unreadable_to(laws: Sequence[Law]) -> Unreadable:
    """Tells each of these laws of a record that is none of those its topic holds."""

    def tell_laws(kind: str, record: Record, error: SchemaError | ClaimError) -> None:
        for law in laws:
            law.unreadable(kind, record, str(error))

    return tell_laws


def takers(laws: Sequence[Law], method: str) -> list[Taker]:
    """The laws that look at what this method is given, each with the method."""
    return [(law, getattr(law, method)) for law in laws if law.sees(method)]


def tell(takers: Sequence[Taker], row: Row | SealedSample) -> None:
    """Show a row to each of these laws. One that cannot judge it, for what was forged may hold anything, says so."""
    for law, take in takers:
        try:
            take(row)
        except (ArithmeticError, AttributeError, LookupError, SchemaError, TypeError, ValueError) as error:
            one = row.row if isinstance(row, SealedSample) else row
            law.fail(f"a {one.name} holds what cannot be judged: {type(error).__name__}: {error}", one)


def handler(kind: str) -> str:
    """The method of a law that sees rows of this kind of topic: `grants` are seen by `grant`."""
    if kind.startswith("turns."):
        return "turn"
    return HANDLERS.get(kind, kind.removesuffix("s"))
