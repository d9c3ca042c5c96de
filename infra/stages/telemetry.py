"""What the runner tells about itself. Exporters implement `RunnerHooks`; the default listens to nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from millrace.infra.log.base import Record


@dataclass(frozen=True, slots=True)
class TurnReport:
    """One committed turn."""

    stage: str
    slot: int
    number: int
    records: Sequence[Record]
    """what was polled for it, duplicates included; `traceparent` headers lead to their traces"""
    duplicates: int
    emitted: Mapping[str, int]
    """records out by logical topic"""
    ends: Mapping[tuple[str, str], int]
    """those of them that say how something ended, by logical topic and their header `reason` or `kind`"""
    now: int
    """micros, the slot's time"""
    fold_s: float
    commit_s: float


class RunnerHooks(Protocol):
    """Hooks of the runner, called between turns on its thread: return soon."""

    def turn(self, report: TurnReport) -> None:
        """A turn was committed."""

    def on_open(self, stage: str, slot: int, seconds: float, record_count: int) -> None:
        """A slot was fenced and restored from that many changelog records."""

    def on_drop(self, stage: str, slot: int, reason: Exception) -> None:
        """A slot lost its turn and will be restored if it is still assigned."""

    def lag(self, stage: str, slot: int, offsets: int) -> None:
        """How many offsets (holes included) lie between the slot's position and the stable end; every few seconds."""


class NoHooks:
    """Listens to nothing."""

    def turn(self, report: TurnReport) -> None:
        """Ignored."""

    def on_open(self, stage: str, slot: int, seconds: float, record_count: int) -> None:
        """Ignored."""

    def on_drop(self, stage: str, slot: int, reason: Exception) -> None:
        """Ignored."""

    def lag(self, stage: str, slot: int, offsets: int) -> None:
        """Ignored."""
