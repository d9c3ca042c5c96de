"""What can go wrong while learning. Every message says what to do next.

TrainerError
├── BadSample             a trajectory that cannot be trained on; the rest of its batch can
├── BadConfiguration      a knob or a layout that cannot work
├── BadData               a row of a data set that cannot be trained on, or a set without one that can
├── NotFormed             a backend was used before `form` and `load`, or after `tear_down`
└── CheckpointError       a checkpoint that cannot be written or read
    └── CorruptCheckpoint    its bytes are not what its manifest says
"""

from __future__ import annotations


class TrainerError(Exception):
    """Root of all errors that `trainers` raises on purpose."""


class BadSample(TrainerError):
    """A sample whose arrays, tokens or numbers are impossible."""


class BadConfiguration(TrainerError):
    """A knob or a layout that cannot work."""


class BadData(TrainerError):
    """A row that cannot be trained on, or data without one that can."""


class NotFormed(TrainerError):
    """A backend was used outside form, load ... tear_down."""


class CheckpointError(TrainerError):
    """A checkpoint that cannot be written or read."""


class CorruptCheckpoint(CheckpointError):
    """A checkpoint whose bytes are not what its manifest says."""
