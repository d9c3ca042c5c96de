"""Folds records through one slot of a stage without any bus: what a stage answers, turn by turn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from millrace.infra.log.base import Record
from millrace.infra.stages.base import Emit, Stage
from millrace.infra.stages.fold import Fold
from millrace.infra.stages.state import SlotState
from millrace.schemas import codec


@dataclass
class Bench:
    """One slot of one stage. `clock` is micros for clock stages; `strict` as of `SlotState`."""

    stage: Stage
    slot: int = 0
    clock: int | None = None
    emits: list[Emit] = field(default_factory=list)
    strict: bool = True

    def __post_init__(self) -> None:
        self.state = SlotState(self.slot, strict=self.strict)
        self.fold = Fold(self.stage, self.state, skip_duplicates=False, isolate=False)
        self.offset = 0

    def record(
        self, topic: str, key: str | bytes, name: str, value: Mapping[str, Any] | bytes | None, **headers: str
    ) -> list[Emit]:
        """Fold one record; returns what came out of it."""
        data = codec.encode(name, value) if isinstance(value, Mapping) else value
        self.offset += 1
        record = Record(
            f"w.{topic}",
            self.slot if topic == self.stage.primary else 0,
            self.offset,
            key if isinstance(key, bytes) else key.encode(),
            data,
            {name: text.encode() for name, text in headers.items()},
            0,
        )
        return self.turn([record])

    def turn(self, records: Iterable[Record] = ()) -> list[Emit]:
        """Fold a turn."""
        out = [emit for _, emit in self.fold.turn(records, self.clock).emits]
        for _ in self.state.changes():
            """Ends the turn."""
        self.emits += out
        return out


def of(emits: Iterable[Emit], name: str) -> list[Mapping[str, Any]]:
    """The records of one kind."""
    return [emit.record for emit in emits if emit.name == name]
