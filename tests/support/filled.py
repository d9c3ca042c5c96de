"""A warehouse of a history in memory, made by the code that makes real ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from millrace.consumers.warehouse.ingest.ingest import Ingest
from millrace.consumers.warehouse.open_store import make_tables
from millrace.consumers.warehouse.store.base import Store
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.memory.bus import MemoryBus
from millrace.testing.world import NAMESPACE
from tests.support.stores import empty_store


@contextmanager
def filled(bus: MemoryBus, path: Path, kind: str = "directory") -> Iterator[Store]:
    """A store of a kind, at `path`, with everything that a world's bus holds, and with the views."""
    with empty_store(kind, path) as store:
        make_tables(store)
        Ingest(bus, store, NAMESPACE, ClaimStore(str(path.with_name("claims"))).behind).catch_up()
        yield store
