"""A rebuild of the tables reads topics and archive as one history, and refuses what neither has."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.consumers.warehouse.ingest.ingest import Ingest
from millrace.consumers.warehouse.rebuild import rebuild_from
from millrace.consumers.warehouse.store.base import Store
from millrace.infra.config import Settings
from millrace.infra.errors import ArchiveError, WarehouseError
from millrace.infra.log.base import Bus
from tests.consumers.test_archive import archived
from tests.support.history import History
from tests.support.history_log import NS
from tests.support.warehouse import Digests, differing, digests


def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path, namespace=NS, topics={"short_hours": 1_000_000})


def clean(store: Store, bus: Bus) -> Digests:
    Ingest(bus, store, NS, lambda data: data).catch_up()
    return digests(store)


def without_workers(found: Digests) -> Digests:
    return {name: value for name, value in found.items() if name != "workers"}


def test_a_log_that_was_cut_gives_the_same_rows(store: Store, tmp_path: Path) -> None:
    made = History(1, versions=3)
    before = clean(store, made.bus)
    both = archived(made, tmp_path / "archive")
    assert not list(made.bus.read(made.topic("events"), 0))
    counts = rebuild_from(both, store, settings(tmp_path), lambda data: data)
    assert counts["events"][0] == counts["events"][1] > 0
    assert differing(without_workers(before), without_workers(digests(store))) == []


def test_what_is_nowhere_is_refused_and_nothing_is_dropped(store: Store, tmp_path: Path) -> None:
    made = History(1, versions=3)
    before = clean(store, made.bus)
    topic = made.topic("trajectories")
    made.bus.delete_before(topic, 0, cut := 3)
    both = archived(made, tmp_path / "archive")
    said = (
        rf"{topic}\[0\]: offsets \d to {cut - 1} are neither in the topic nor in the archive; what is left begins at 3"
    )
    with pytest.raises(WarehouseError, match=said):
        rebuild_from(both, store, settings(tmp_path), lambda data: data)
    assert differing(before, digests(store)) == []
    counts = rebuild_from(both, store, settings(tmp_path), lambda data: data, forget=True)
    assert 0 < counts["trajectories"][1] < counts["trajectories"][0]


def test_a_flipped_byte_is_named_before_anything_is_dropped(store: Store, tmp_path: Path) -> None:
    made = History(1, versions=2)
    before = clean(store, made.bus)
    both = archived(made, tmp_path / "archive")
    segment = flipped(tmp_path / "archive" / made.topic("trajectories"))
    with pytest.raises(ArchiveError, match=rf"{segment} is damaged (at|behind) offset \d+|{segment} is damaged from"):
        rebuild_from(both, store, settings(tmp_path), lambda data: data)
    assert differing(before, digests(store)) == []


def flipped(folder: Path) -> Path:
    """A segment below a folder, one of whose bytes is another."""
    segment = sorted(folder.rglob("*.parquet"))[0]
    stored = bytearray(segment.read_bytes())
    stored[len(stored) // 3] ^= 1
    segment.write_bytes(stored)
    return segment
