"""All slots of one process: membership, polling, and restoring what was refused.

Invariant: a record is folded only by a slot that is open, from the slot's own position on; what is polled for a slot
that is not open yet is dropped and read again, because opening seeks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from threading import Event

from millrace.infra import faults
from millrace.infra.errors import BusError, RefusedError, StorageError, TooLargeError, TopicError
from millrace.infra.log.base import LATEST, Bus, MemberToken, Record
from millrace.infra.log.topics import full_name
from millrace.infra.stages.base import Stage
from millrace.infra.stages.slot import RunnerSettings, Slot

log = logging.getLogger(__name__)

IDLE_S = 0.05
LOOK_EVERY_S = 2.0
LINGER_S = 0.1
"""Least time between two turns that are not full: fewer, larger transactions cost the broker less than half."""


class StageRunner:
    """Runs the slots of a stage that the group gives this process. Not thread-safe: one thread steps it."""

    def __init__(
        self, bus: Bus, stage: Stage, settings: RunnerSettings, *, client_id: str = "", backoff_s: float = 0.2
    ) -> None:
        """Joins the group `<ns>.<stage>`. A slot that failed is opened again after `backoff_s`."""
        self._bus, self._stage, self._settings, self._backoff_s = bus, stage, settings, backoff_s
        self.slots: dict[int, Slot] = {}
        self._not_before: dict[int, float] = {}
        self._look_at = 0.0
        self._member = bus.member(
            f"{settings.namespace}.{stage.name}",
            full_name(settings.namespace, stage.primary),
            client_id=client_id or stage.name,
            on_assign=self._park,
            on_revoke=self._close_slots,
        )

    def step(self, timeout_s: float = IDLE_S) -> int:
        """Poll once and fold what came; returns how many records were folded.

        Raises what no record can bring about (TopicError, a missing claims directory ...); a slot that lost its turn is
        restored, and what cannot be folded is a dead letter."""
        records = self._member.poll(self._settings.turn_records, timeout_s)
        slots = self._member.assignment()
        if not slots:
            return 0
        try:
            token = self._member.token()
        except RefusedError as error:
            # What was polled cannot be committed and will not be polled again: every slot has to seek.
            for number in list(self.slots):
                self._close_slots({number})
                self._note_loss(number, error)
            return 0
        faults.point("runner.after_poll")
        batches: dict[int, list[Record]] = {}
        for record in records:
            batches.setdefault(record.partition, []).append(record)
        count = 0
        for number in sorted(slots):
            slot = self.slots.get(number)
            if slot is None:
                self._open(number)
            else:
                count += self._work(slot, batches.get(number, []), token)
        self._look()
        return count

    def close(self) -> None:
        """Leave the group and let go of every slot. Idempotent."""
        self._member.close()
        self._close_slots(set(self.slots))

    def _open(self, number: int) -> None:
        if time.monotonic() < self._not_before.get(number, 0.0):
            return
        try:
            self.slots[number] = Slot(self._bus, self._stage, number, self._member, self._settings)
        except (TopicError, TooLargeError):
            raise
        except (BusError, StorageError) as error:
            self._note_loss(number, error)

    def _work(self, slot: Slot, records: list[Record], token: MemberToken) -> int:
        try:
            return slot.work(records, token)
        except (TopicError, TooLargeError):
            raise
        except (BusError, StorageError) as error:
            self.slots.pop(slot.number).close()
            self._note_loss(slot.number, error)
            return 0

    def _note_loss(self, number: int, error: BusError | StorageError) -> None:
        log.warning("%s slot %d is restored: %s", self._stage.name, number, error)
        self._not_before[number] = time.monotonic() + self._backoff_s
        self._settings.telemetry.on_drop(self._stage.name, number, error)

    def _park(self, partitions: set[int]) -> Mapping[int, int]:
        return dict.fromkeys(partitions, LATEST)  # parked: opening the slot seeks to where it goes on

    def _close_slots(self, partitions: set[int]) -> None:
        for number in partitions:
            slot = self.slots.pop(number, None)
            if slot is not None:
                slot.close()

    def _look(self) -> None:
        """Every few seconds: mend what a broker's crash left behind, and tell how far each slot is behind."""
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + LOOK_EVERY_S
        try:
            self._bus.mend()
            for number, slot in self.slots.items():
                self._settings.telemetry.lag(self._stage.name, number, slot.behind())
        except BusError as error:
            log.warning("%s cannot look after its log: %s", self._stage.name, error)


def run_stage(bus: Bus, stage: Stage, settings: RunnerSettings, stop: Event, *, client_id: str = "") -> None:
    """Run a stage until `stop` is set, then leave the group. Raises what `StageRunner.step` raises."""
    runner = StageRunner(bus, stage, settings, client_id=client_id)
    try:
        while not stop.is_set():
            began = time.monotonic()
            if 0 < runner.step() < settings.turn_records:
                stop.wait(LINGER_S - (time.monotonic() - began))
    finally:
        runner.close()
