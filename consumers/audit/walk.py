"""Reads every topic of one policy once, in a fixed order, and hands each record to the claims.

Invariants: only committed records are read; the end of every topic is taken before that of the topics it points into,
and with nothing open before it, so what a live system appends meanwhile never looks like a violation; one record is
held at a time, and of trajectories one batch with the model calls they name. What stays open for longer than
`PATIENCE_S` is noted: what points behind it then looks like a violation.

Order: weights, ledger, decisions, prompts, resolutions, grants, completions, trajectories, evaluations, turns, dead
letters, then per partition raw and events side by side. So a claim knows all that was decided when it sees what it was
decided about.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING

from consumers.audit.rows import Row, Sample
from infra.bus.base import Bus, Record
from infra.errors import AuditError, ClaimError, TopicError
from infra.topics import full_name, stages_of, turns_of
from schemas.codec import decode
from schemas.errors import SchemaError

if TYPE_CHECKING:
    from consumers.audit.claim import Claim
    from consumers.audit.facts import Facts

TURNS = tuple(turns_of(role) for role in stages_of(""))
"""kinds of topic with turns, by role: a stage of one policy carries its name in the topic's"""
NAMES = {
    "weights": "WeightVersion",
    "ledger": "LedgerEntry",
    "decisions": "Decision",
    "prompts": "Prompt",
    "resolutions": "Resolution",
    "grants": "Grant",
    "completions": "Completion",
    "trajectories": "Trajectory",
    "evaluations": "Trajectory",
    "dead-letters": "DeadLetter",
    "raw": "Event",
    **dict.fromkeys(TURNS, "Turn"),
}
"""record name by kind of topic; `events` also holds Progress"""

SHARED = ("raw", "events", "dead-letters", "decisions")
JOINT = ("ledger", "weights", "resolutions", "grants")
"""topics that point at each other inside one transaction"""
LOOK_S = 0.02
PATIENCE_S = 20.0
"""twice as long as a transaction whose owner died stays open"""
MAY_BE_WHOLE = "what is named at the log's end may be whole; audit again"
BATCH = 64
"""trajectories whose model calls are fetched together"""

Resolve = Callable[[Record], Record]
"""turns a record that stands for a claim into the record that was claimed, and any other into itself"""


class Walk:
    """One reading of the topics. `starts` and `ends` are by kind of topic and partition."""

    def __init__(self, bus: Bus, namespace: str, policy: str, resolve: Resolve) -> None:
        """Raises AuditError when the policy has no topic of weights."""
        self.bus = bus
        self.policy = policy
        self.resolve = resolve
        turns = {turns_of(role): turns_of(stage) for role, stage in stages_of(policy).items()}
        names = {kind: turns.get(kind) or (kind if kind in SHARED else f"{policy}.{kind}") for kind in ORDER}
        self.full = {kind: full_name(namespace, name) for kind, name in names.items()}
        self.starts: dict[str, dict[int, int]] = {}
        self.ends: dict[str, dict[int, int]] = {}
        self.counts: Counter[str] = Counter()
        self.notes: list[str] = []
        self._measure_all()
        if not self.starts.get("weights"):
            raise AuditError(
                f"there is no topic {self.full['weights']}: check [policy] name and the namespace, or create the policy"
            )

    def _measure_all(self) -> None:
        """Take starts and ends. A transaction ends on one partition after the other and must not seem to be half there:
        what was written to a topic is decided before its end is taken, or a note says that it was not."""
        for kind in ORDER[: ORDER.index(JOINT[0])]:
            self._measure(kind)
        self._measure_joint()
        for kind in ORDER[ORDER.index(JOINT[-1]) + 1 :]:
            self._decided(kind)
            self._measure(kind)
        for kind in ORDER:
            self._describe(kind)

    def _measure_joint(self) -> None:
        """The ends of one moment at which nothing was open on any of them."""
        until = time.monotonic() + PATIENCE_S
        while True:
            before = {kind: self._ask(self.bus.ends, kind) for kind in JOINT}
            written = {kind: self._ask(self.bus.written, kind) for kind in JOINT}
            for kind in JOINT:
                self._measure(kind)
            if before == written == {kind: self.ends[kind] for kind in JOINT}:
                return
            if time.monotonic() > until:
                self.notes.append(f"transactions on {', '.join(JOINT)} never rested: {MAY_BE_WHOLE}")
                return
            time.sleep(LOOK_S)

    def _decided(self, kind: str) -> None:
        """Wait until what was written before now is decided."""
        written, until = self._ask(self.bus.written, kind), time.monotonic() + PATIENCE_S
        while any(end < written[p] for p, end in self._ask(self.bus.ends, kind).items()):
            if time.monotonic() > until:
                self.notes.append(f"transactions on {kind} stayed open: {MAY_BE_WHOLE}")
                return
            time.sleep(LOOK_S)

    def _ask(self, look: Callable[[str], dict[int, int]], kind: str) -> dict[int, int]:
        """Offsets by partition; none of a topic that does not exist."""
        try:
            return look(self.full[kind])
        except TopicError:
            return {}

    def _measure(self, kind: str) -> None:
        self.ends[kind], self.starts[kind] = self._ask(self.bus.ends, kind), self._ask(self.bus.starts, kind)

    def _describe(self, kind: str) -> None:
        if not self.starts[kind]:
            self.notes.append(f"{self.full[kind]} does not exist")
        lost = ", ".join(f"{p} from offset {at}" for p, at in sorted(self.starts[kind].items()) if at > 0)
        if lost:
            self.notes.append(f"{self.full[kind]} has lost its beginning to retention; read partition {lost}")

    def partitions(self, kind: str) -> list[int]:
        return sorted(self.starts[kind])

    def records(self, kind: str, partition: int) -> Iterator[Record]:
        """Committed records of one partition up to the measured end."""
        start, end = self.starts[kind][partition], self.ends[kind][partition]
        for record in self.bus.read(self.full[kind], partition, start, end):
            self.counts[kind] += 1
            yield record

    def run(self, facts: Facts, claims: Sequence[Claim]) -> None:
        """Walk once: the facts see what they ask for first, then every claim; at the end the claims finish."""
        learn = {"weights": facts.weights, "ledger": facts.ledger, "resolutions": facts.resolution}
        for kind in ("weights", "ledger", "decisions", "prompts", "resolutions", "grants", "completions"):
            self._feed(kind, claims, learn.get(kind))
        self._samples(claims)
        for kind in ("evaluations", *TURNS, "dead-letters"):
            self._feed(kind, claims)
        for partition in sorted({*self.partitions("events"), *self.partitions("raw")}):
            self._slot(partition, claims)
        for claim in claims:
            claim.finish()

    def _slot(self, partition: int, claims: Sequence[Claim]) -> None:
        """Raw and events of one partition side by side: each event right after the raw event that it names."""
        takers = {kind: [claim for claim in claims if claim.sees(handler(kind))] for kind in ("raw", "events")}
        raw = self._rows("raw", partition, claims)
        ahead = next(raw, None)
        for row in self._rows("events", partition, claims):
            source = row["source_place"] if row.name == "Event" else None
            while source and ahead is not None and ahead.place.offset <= source["offset"]:
                for claim in takers["raw"]:
                    claim.raw(ahead)
                ahead = next(raw, None)
            for claim in takers["events"]:
                claim.event(row)
        for row in chain([ahead] if ahead else [], raw):
            for claim in takers["raw"]:
                claim.raw(row)
        for claim in claims:
            claim.slot_end(partition)

    def _rows(self, kind: str, partition: int, claims: Sequence[Claim]) -> Iterator[Row]:
        """Decoded records of one partition; every claim that asks sees the records first."""
        seers = [claim for claim in claims if claim.sees("record")]
        if partition not in self.starts[kind]:
            return
        for record in self.records(kind, partition):
            for claim in seers:
                claim.record(kind, record)
            row = self.row(kind, record, claims)
            if row is not None:
                yield row

    def _feed(self, kind: str, claims: Sequence[Claim], learn: Callable[[Row], None] | None = None) -> None:
        takers = [claim for claim in claims if claim.sees(handler(kind))]
        for partition in self.partitions(kind):
            for row in self._rows(kind, partition, claims):
                if learn is not None:
                    learn(row)
                for claim in takers:
                    getattr(claim, handler(kind))(row)

    def row(self, kind: str, record: Record, claims: Sequence[Claim]) -> Row | None:
        """The decoded record, or None when it is none that this kind of topic holds: the claims are told."""
        try:
            if record.value is None:
                raise SchemaError("a tombstone where every record is kept")
            stored = self.resolve(record).value or b""
            name, value = decode(stored)
            wanted = NAMES.get(kind, "Event")
            if name not in (wanted, "Progress" if kind == "events" else wanted):
                raise SchemaError(f"a {name} where a {wanted} belongs")
        except (SchemaError, ClaimError) as error:
            for claim in claims:
                claim.unreadable(kind, record, str(error))
            return None
        return Row(record, name, value, stored)

    def latest(self, kind: str) -> Row | None:
        """The last readable record of a kind that was committed since its end was measured; None without one."""
        found = None
        for partition in self.partitions(kind):
            for record in self.bus.read(self.full[kind], partition, self.ends[kind][partition]):
                found = self.row(kind, record, ()) or found
        return found

    def _samples(self, claims: Sequence[Claim]) -> None:
        takers = [claim for claim in claims if claim.sees("trajectory")]
        for partition in self.partitions("trajectories"):
            rows = self._rows("trajectories", partition, claims)
            while batch := list(islice(rows, BATCH)):
                for sample in self._with_calls(batch, claims):
                    for claim in takers:
                        claim.trajectory(sample)

    def _with_calls(self, rows: Sequence[Row], claims: Sequence[Claim]) -> Iterator[Sample]:
        """Samples with the events they name; None stands where nothing (readable) lies."""
        wanted = [row.places("events") for row in rows]
        found = iter(self.bus.fetch([place for places in wanted for place in places]))
        for row, places in zip(rows, wanted, strict=True):
            calls = [self._call(record) if (record := next(found)) else None for _ in places]
            sample = Sample(row, places, calls)
            try:
                _ = sample.traces
            except SchemaError as error:
                for claim in claims:
                    claim.unreadable("trajectories", row.raw, str(error))
            else:
                yield sample

    def _call(self, record: Record) -> Row | None:
        """A model call whose body can be read. What cannot is named where `events` are walked."""
        row = self.row("events", record, ())
        try:
            return row if row is not None and row.name == "Event" and row.body else None
        except SchemaError:
            return None


ORDER = (
    *TURNS,
    "ledger",
    "weights",
    "resolutions",
    "grants",
    "completions",
    "trajectories",
    "evaluations",
    "dead-letters",
    "events",
    "raw",
    "prompts",
    "decisions",
)
"""the order in which ends are taken: what points, before what it points at"""

HANDLERS = {"ledger": "ledger", "raw": "raw", "weights": "weights", "dead-letters": "dead_letter"}


def handler(kind: str) -> str:
    """The method of a claim that sees rows of this kind of topic: `grants` are seen by `grant`."""
    if kind.startswith("turns."):
        return "turn"
    return HANDLERS.get(kind, kind.removesuffix("s"))
