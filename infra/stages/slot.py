"""One slot of a stage: fence, restore, then turn after turn, each one transaction.

Invariants:

- Nothing is folded before the former owner is fenced and the state is the one of the last committed turn.
- What the sides held when the slot was opened is folded before any record of the primary.
- A turn's emits, changelog, turn record and input offsets are committed together or not at all.
- A value of any size is logged: one too large for its topic as a claim, which a restore looks behind.
- Every commit carries the member token that was captured when its records were polled.
- After any error a slot is closed and opened again; its memory is never repaired.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from millrace.infra import faults
from millrace.infra.errors import TopicError, UnreachableError
from millrace.infra.log.base import Bus, Member, MemberToken, Outgoing, Record
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.topics import changelog_of, full_name, turns_of
from millrace.infra.stages.base import Stage
from millrace.infra.stages.fold import Fold, FoldedTurn
from millrace.infra.stages.outbox import Outbox
from millrace.infra.stages.state import SlotState
from millrace.infra.stages.telemetry import NoHooks, RunnerHooks, TurnReport
from millrace.schemas import codec
from millrace.schemas.ids import now_micros
from millrace.schemas.records import Turn

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunnerSettings:
    """What a runner is told. The last three are for tests."""

    namespace: str
    claims: ClaimStore | None = None
    telemetry: RunnerHooks = field(default_factory=NoHooks)
    clock: Callable[[], int] = now_micros
    """micros; asked once a turn, by clock stages alone"""
    turn_records: int = 500
    turn_bytes: int = 4 << 20
    skip_duplicates: bool = True
    strict: bool = False
    """find values that a stage mutated"""
    isolate: bool = True
    """whether what cannot be folded becomes a dead letter; else what a stage raises ends the turn"""


class Slot:
    """An open slot. Use it from the thread that polls `member`."""

    def __init__(self, bus: Bus, stage: Stage, number: int, member: Member, settings: RunnerSettings) -> None:
        """Fences, restores and seeks the member. Raises BusError and ClaimError; nothing is left open then."""
        self._bus, self._stage, self.number, self._settings = bus, stage, number, settings
        self._primary = full_name(settings.namespace, stage.primary)
        self._changelog = full_name(settings.namespace, changelog_of(stage.name))
        self._turns = full_name(settings.namespace, turns_of(stage.name))
        self._outbox = Outbox(settings.namespace, settings.claims)
        began = time.perf_counter()
        self._transactor = bus.transactor(f"{settings.namespace}.{stage.name}.{number}")
        try:
            count = self._restore(member)
        except BaseException:
            self._transactor.close()
            raise
        settings.telemetry.on_open(stage.name, number, time.perf_counter() - began, count)

    def _restore(self, member: Member) -> int:
        faults.point("runner.after_fence")
        if not self._bus.is_settled(self._changelog, self.number):
            raise UnreachableError(
                f"{self._changelog}[{self.number}] holds a transaction that was decided and not ended: it is mended in"
                " a few seconds; if not, see `millrace.infra.log.kafka.mend`"
            )
        first = self._bus.starts(self._primary)[self.number]
        self.position = member.committed_offsets({self.number}).get(self.number, first)
        if self.position < first:
            raise TopicError(
                f"{self._primary}[{self.number}] is kept from {first}, but {self._stage.name} has read to"
                f" {self.position} only: records were deleted unread. Keep the topic longer; to go on without them,"
                " reset the group's offsets."
            )
        changelog = list(self._bus.read(self._changelog, self.number))
        settings = self._settings
        state = SlotState.restore(self.number, changelog, claims=settings.claims, strict=settings.strict)
        self._fold = Fold(
            self._stage,
            state,
            namespace=settings.namespace,
            skip_duplicates=settings.skip_duplicates,
            isolate=settings.isolate,
        )
        self._sides, ends = self._catch_up()
        self._tail = self._bus.tail(ends) if ends else None
        member.seek(self.number, self.position)
        faults.point("runner.after_restore")
        return len(changelog)

    def _catch_up(self) -> tuple[list[Record], dict[tuple[str, int], int]]:
        """What the sides hold that was not folded yet, and where to follow them: all of it comes before the primary."""
        records: list[Record] = []
        ends: dict[tuple[str, int], int] = {}
        for side in self._stage.sides:
            topic = full_name(self._settings.namespace, side)
            at, end = self._fold.sides.get(side, 0), self._bus.ends(topic)[0]
            if at < end:
                records += self._bus.read(topic, 0, at, end)
            ends[topic, 0] = max(at, end)
        return records, ends

    @property
    def state(self) -> SlotState:
        """What the slot knows; read-only for everyone else."""
        return self._fold.state

    def work(self, news: Sequence[Record], token: MemberToken) -> int:
        """Fold what was polled for this slot, and side records and timers, in as many turns as it takes.

        Returns how many records were folded. Raises BusError and StorageError: close this slot then."""
        records = [record for record in news if record.offset >= self.position] if news else []
        if self._tail is not None:
            records = self._sides + self._tail.poll(self._settings.turn_records, 0) + records
            self._sides = []
        elif not records and not self._stage.clock:
            return 0
        count = 0
        for batch in _cut(records, self._settings):
            count += self._turn(batch, token)
        return count

    def _turn(self, records: Sequence[Record], token: MemberToken) -> int:
        clock = self._settings.clock() if self._stage.clock else None
        if not records and self._fold.idle(clock):
            return 0
        began = time.perf_counter()
        fold = self._fold.turn(records, clock)
        between = time.perf_counter()
        for failure in fold.failures:
            log.error(
                "%s slot %d cannot fold %s: %s at %s. It is a dead letter now, and the stage goes on.",
                self._stage.name,
                self.number,
                *failure,
            )
        position = next((r.offset + 1 for r in reversed(records) if r.topic == self._primary), self.position)
        counts = self._commit(fold, position, token)
        self.position = position
        self._settings.telemetry.turn(
            TurnReport(
                stage=self._stage.name,
                slot=self.number,
                number=fold.number,
                records=records,
                duplicates=fold.duplicates,
                emitted=counts,
                ends=_ends(fold),
                now=fold.now,
                fold_s=between - began,
                commit_s=time.perf_counter() - between,
            )
        )
        return fold.records

    def _commit(self, fold: FoldedTurn, position: int, token: MemberToken) -> dict[str, int]:
        transactor, number = self._transactor, self.number
        faults.point("runner.before_begin")
        transactor.begin()
        faults.point("runner.after_begin")
        name = f"{self._stage.name}/{number}/{fold.number}".encode()
        counts = self._outbox.send(transactor, fold.emits, name, fold.encodings)
        faults.point("runner.after_emits")
        claims = self._settings.claims
        for key, change in self._fold.state.changes():
            value = change if change is None or claims is None else claims.fitting("Change", change)
            transactor.send(Outgoing(self._changelog, key, value, partition=number), wants_place=False)
        turn: Turn = {
            "stage": self._stage.name,
            "slot": number,
            "number": fold.number,
            "now": fold.now,
            "clock": fold.clock,
            "ranges": fold.ranges,
            "emitted": counts,
            "duplicates": fold.duplicates,
        }
        record = Outgoing(self._turns, str(number).encode(), codec.encode("Turn", turn), partition=number)
        transactor.send(record, wants_place=False)
        faults.point("runner.after_send")
        transactor.commit({(self._primary, number): position}, token)
        faults.point("runner.after_commit")
        return counts

    def behind(self) -> int:
        """Offsets between the slot's position and the stable end, holes included."""
        return self._bus.ends(self._primary)[self.number] - self.position

    def close(self) -> None:
        """Let go of the slot; an open transaction is aborted if this is still its owner."""
        if self._tail is not None:
            self._tail.close()
        self._transactor.close()


def _ends(fold: FoldedTurn) -> Counter[tuple[str, str]]:
    """Emits by topic and what their headers say of them."""
    ends = ((emit.topic, emit.headers.get("reason") or emit.headers.get("kind")) for _, emit in fold.emits)
    return Counter((topic, end) for topic, end in ends if end)


def _cut(records: Sequence[Record], settings: RunnerSettings) -> list[Sequence[Record]]:
    """Records in turns of bounded count and size; one empty turn, for timers, when there are none."""
    if not records:
        return [records]
    turns: list[Sequence[Record]] = []
    start = size = 0
    for at, record in enumerate(records):
        more = len(record.value or b"")
        if at > start and (at - start >= settings.turn_records or size + more > settings.turn_bytes):
            turns.append(records[start:at])
            start, size = at, 0
        size += more
    turns.append(records[start:])
    return turns
