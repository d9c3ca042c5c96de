"""What one learner process keeps from generation to generation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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


class LearnerObserver:
    """Follows a learner process; this one does nothing."""

    def on_phase(self, phase: str) -> None:
        """The state machine has come to a phase."""

    def on_idle(self, reason: str) -> None:
        """This process does not train."""

    def on_weights(self, version: int) -> None:
        """This process has the weights of a version."""

    def on_commit(self, entry: LedgerEntry) -> None:
        """This process committed a version."""

    def warn(self, text: str) -> None:
        """Something happened that an operator should know."""


@dataclass(slots=True)
class Parts:
    """group: of the policy's learners; url: where this one's store listens; topics: full names by last word; root: the
    directory of versions; timeout_s: longest wait of a collective; stopping: whether this process was asked to stop;
    log: from the first generation that this process leads on; sender: sends versions to engines, where they take
    broadcasts."""

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
    observer: LearnerObserver = field(default_factory=LearnerObserver)
    log: PolicyLog | None = None
    sender: WeightSender | None = None

    @property
    def backend(self) -> Backend:
        """The trainer's."""
        return self.trainer.backend
