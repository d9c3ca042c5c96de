"""The siblings of the bus, behind one fixture."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millrace.infra.log.archive.archive import Archive
from millrace.infra.log.archive.bus import ArchivedBus
from millrace.infra.log.base import Bus, TopicSpec
from millrace.infra.log.kafka.bus import KafkaBus
from millrace.infra.log.memory.bus import MemoryBus


@pytest.fixture(params=["memory", "archived", pytest.param("kafka", marks=[pytest.mark.slow, pytest.mark.kafka])])
def bus(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bus]:
    if request.param == "memory":
        yield MemoryBus()
        return
    if request.param == "archived":
        yield ArchivedBus(MemoryBus(), Archive(str(tmp_path / "archive")))
        return
    # Long enough for a machine that stands still for a moment; a rebalance is heard of after a twentieth of it.
    with KafkaBus(request.getfixturevalue("broker"), session_timeout_s=12.0) as found:
        yield found


@pytest.fixture
def topic(bus: Bus) -> Callable[..., str]:
    """Makes a topic of its own and returns its name."""

    def make(partitions: int = 1, **config: str) -> str:
        name = f"t{uuid.uuid4().hex[:12]}"
        settings = {key.replace("_", "."): value for key, value in config.items()}
        bus.ensure_topics([TopicSpec(name, partitions, settings)])
        return name

    return make
