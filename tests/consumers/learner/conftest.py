from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.bus.memory import MemoryBus
from infra.config import Settings
from tests.support.feed import settings_for, start_policy


class Place:
    """One learner process's worth of work, in this thread, over a bus in memory."""

    def __init__(self, folder: Path, **flags: Any) -> None:
        self.settings: Settings = settings_for(folder, "127.0.0.1:1", "t", **flags)[0]
        self.bus = MemoryBus()
        self.notes: list[str] = []
        self.said: list[Any] = []
        start_policy(self.settings, self.bus, folder)

    def learn(self, versions: int, bus: Any = None) -> None:
        """Run a learner until `versions` are committed."""
        from consumers.learner.build import build
        from consumers.learner.learner import Learner
        from consumers.learner.watch import Watchdog

        chosen = self.settings.model_copy(
            update={"learner": self.settings.learner.model_copy(update={"max_versions": versions})}
        )
        parts = build(chosen, bus or self.bus, stopping=lambda: False, note=self.notes.append, said=self.said.append)
        watchdog = Watchdog(self.bus, parts.group, parts.backend.abort)
        try:
            Learner(parts, watchdog).run()
        finally:
            watchdog.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Callable[..., Place]]:
    """Makes places, numbered."""
    made: list[Place] = []

    def make(**flags: Any) -> Place:
        made.append(Place(tmp_path / f"place-{len(made)}", **flags))
        return made[-1]

    yield make
    for one in made:
        one.bus.close()
