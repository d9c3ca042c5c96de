"""What can go wrong while learning. Every message says what to do next. `infra.errors` draws the whole tree."""

from __future__ import annotations

from millrace.schemas.errors import MillraceError

REMEDIES = (
    'set [learner] precision = "bf16", activation_checkpointing = true, optimizer_offload = true, or train an adapter '
    "([learner] lora)"
)
"""what makes a model or a sample fit that does not fit in a card"""


class TrainerError(MillraceError):
    """Training cannot go on as it is asked to."""


class BadSample(TrainerError):
    """A sample whose arrays, tokens or numbers are impossible."""


class BadConfiguration(TrainerError):
    """A knob or a layout that cannot work."""


class OutOfMemory(TrainerError):
    """A step took more memory than the card has; the budget of its rows is halved, and it can be done again from the
    version that it began with."""


class BadData(TrainerError):
    """A row that cannot be trained on, or data without one that can."""


class NotFormed(TrainerError):
    """A backend was used outside form, load ... tear_down."""


class CheckpointError(TrainerError):
    """A checkpoint that cannot be written or read."""


class CorruptCheckpoint(CheckpointError):
    """A checkpoint whose bytes are not what its manifest says."""
