"""What one learner process keeps from generation to generation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.distributed_c10d import Store

from millrace.consumers.learner.group.identity import Identity
from millrace.consumers.learner.group.membership import Membership
from millrace.consumers.learner.version.log import PolicyLog
from millrace.consumers.learner.version.sender import WeightSender
from millrace.infra.config import Settings
from millrace.infra.log.base import Bus
from millrace.infra.log.history.places import PlaceReader
from millrace.schemas.records import LedgerEntry
from millrace.trainers.backends.base import Backend
from millrace.trainers.learning import Trainer


@dataclass(slots=True)
class Parts:
    """group: of the policy's learners; url: where this one's store listens; topics: full names by last word; root: the
    directory of versions; timeout_s: longest wait of a collective; stopping: whether this process was asked to stop;
    note: hears what an operator should know; at: hears where the state machine is; said: hears each entry that this
    process committed; holds: hears each version whose weights it has; waits: hears why it does not train; log: kept
    once this process has led; sender: sends versions to engines, where they take broadcasts."""

    settings: Settings
    bus: Bus
    group: str
    url: str
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
    note: Callable[[str], None]
    at: Callable[[str], None]
    said: Callable[[LedgerEntry], None]
    holds: Callable[[int], None]
    waits: Callable[[str], None]
    log: PolicyLog | None = None
    sender: WeightSender | None = None

    @property
    def backend(self) -> Backend:
        """The trainer's."""
        return self.trainer.backend
