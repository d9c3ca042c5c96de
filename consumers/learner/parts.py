"""What one learner process keeps from generation to generation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.distributed_c10d import Store

from consumers.learner.identity import Identity
from consumers.learner.log import Log
from consumers.learner.membership import Membership
from consumers.places import PlaceReader
from infra.bus.base import Bus
from infra.config import Settings
from schemas.records import LedgerEntry
from trainers.backends.base import Backend
from trainers.learning import Trainer


def nobody(_: str) -> None:
    """Hears what nobody else wants to."""


@dataclass(slots=True)
class Parts:
    """topics: full names by last word; root: the directory of versions; timeout_s: longest wait of a collective;
    stopping: whether this process was asked to stop; said: hears each committed entry (rank 0); note: hears what an
    operator should know; at: hears where the state machine is; log: kept once this process has led."""

    settings: Settings
    bus: Bus
    topics: Mapping[str, str]
    workers_topic: str
    transactional_id: str
    root: Path
    identity: Identity
    membership: Membership
    reader: PlaceReader
    store: Store
    trainer: Trainer
    timeout_s: float
    stopping: Callable[[], bool]
    said: Callable[[LedgerEntry], None]
    note: Callable[[str], None]
    at: Callable[[str], None] = nobody
    log: Log | None = None

    @property
    def backend(self) -> Backend:
        """The trainer's."""
        return self.trainer.backend
