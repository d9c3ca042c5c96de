"""What the ranks are told, and what they answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from millrace.infra.config import Settings


@dataclass(frozen=True, slots=True)
class Prepare:
    """Make the trainer that these settings describe."""

    settings: Settings


@dataclass(frozen=True, slots=True)
class FormGroup:
    """Be `rank` of `world` ranks that meet under `key` in the store at `port`, and load the version in `start`."""

    rank: int
    world: int
    port: int
    key: str
    start: Path
    digest: str


@dataclass(frozen=True, slots=True)
class TrainStep:
    """Train the step in the folder `material`; rank 0 writes the version under `root`. packed: a folder for the
    micro-batches as they trained, where they are wanted."""

    material: Path
    root: Path
    packed: Path | None = None


@dataclass(frozen=True, slots=True)
class Leave:
    """Tear the group down."""


Order: TypeAlias = Prepare | FormGroup | TrainStep | Leave


@dataclass(frozen=True, slots=True)
class Formed:
    """layout: as the ledger names it; cells: by rank."""

    layout: str
    cells: list[int]


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """A step's outcome; of rank 0 with the directory that it wrote. files: name -> sha256 hex."""

    metrics: Mapping[str, float]
    unchanged: str | None
    path: Path | None = None
    digest: str = ""
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Done:
    """It is as it was ordered."""


@dataclass(frozen=True, slots=True)
class Failed:
    """What a rank raised. meant: whether the error is one that says what to do; text: its message or its trace."""

    text: str
    meant: bool


Answer: TypeAlias = Formed | TrainedStep | Done | Failed
