"""A deployment of many partitions: no statement about them grows beyond what an engine takes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.consumers.warehouse.ingest.proofs import Proof, write_proofs
from millrace.consumers.warehouse.store import fences
from millrace.consumers.warehouse.store.base import Store
from millrace.consumers.warehouse.store.fences import PROOFS, Fence, take_over
from millrace.consumers.warehouse.store.migrations import migrate
from millrace.consumers.warehouse.store.tables import LOG
from millrace.infra.errors import WarehouseTaken
from tests.support.stores import SERVERS, empty_store

pytestmark = pytest.mark.slow

WHERE = [(f"{'n' * 40}.policy-{number % 50}.trajectories", number // 50) for number in range(150)]
"""partitions of many policies: more than one statement names"""


@pytest.fixture(params=SERVERS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with empty_store(request.param, tmp_path / "tables") as made:
        migrate(made)
        yield made


def test_many_partitions_are_proven_by_their_holder_alone(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fences, "MANY", 1)  # rows of former holders are deleted at once
    proofs = [Proof("trajectories", topic, part, 0, 0, 1, "d", 0, "t") for topic, part in WHERE]
    for holder in ("former", "mine"):
        take_over(store, holder, WHERE)
    write_proofs(store, proofs, {where: Fence(*where, "mine") for where in WHERE}, PROOFS)
    counted = f"SELECT count(), uniqExact(topic, part) FROM {LOG}.blocks"
    assert store.rows(counted) == [(len(WHERE), len(WHERE))]
    with pytest.raises(WarehouseTaken):
        write_proofs(store, proofs, {where: Fence(*where, "former") for where in WHERE}, PROOFS)
    assert store.rows(counted) == [(len(WHERE), len(WHERE))]
