from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.consumers.learner.version.order import LearningOrder, Steps
from millrace.infra.errors import LearnerError


def ready(seq: int | None, **over: Any) -> Any:
    row = {"kind": "ready", "seq": seq, "ticket": seq, "group": f"g{seq}", "setting": None, "trajectories": []}
    return {**row, **over}


def setting(name: str, value: Any, seq: int | None = None, ticket: int | None = None) -> Any:
    inner = {"name": name, "value": json.dumps(value), "from_seq": seq, "from_ticket": ticket, "decision": None}
    return {"kind": "setting", "seq": None, "ticket": None, "group": "", "setting": inner}


def order(batch: int = 2, eta: int = 1) -> LearningOrder:
    return LearningOrder(batch, eta, "reserve")


def test_a_batch_waits_for_all_of_its_groups_in_any_order() -> None:
    it = order(3)
    for seq in (2, 0):
        it.fold(ready(seq))
    assert it.next(0) is None
    assert it.pending(0) == 2
    it.fold(ready(1))
    batch = it.next(0)
    assert batch is not None
    assert [group["seq"] for group in batch.groups] == [0, 1, 2]
    assert (batch.seq_lo, batch.seq_hi) == (0, 3)


def test_the_batch_size_changes_where_dispatch_says() -> None:
    it = order(2)
    it.fold(setting("batch", 3, seq=4))
    for seq in range(10):
        it.fold(ready(seq))
    sizes = []
    seq = 0
    while (batch := it.next(seq)) is not None:
        sizes.append(len(batch.groups))
        seq = batch.seq_hi
    assert sizes == [2, 2, 3, 3]


def test_eta_holds_by_ticket_and_release_by_seq() -> None:
    it = order(2, eta=1)
    it.fold(setting("eta", 4, ticket=3))
    it.fold(setting("release", "mask-head", seq=2))
    for seq in range(4):
        it.fold(ready(seq))
    first, second = it.next(0), it.next(2)
    assert first is not None
    assert second is not None
    assert (first.eta, second.eta) == (1, 4)
    assert (it.masks_head(0), it.masks_head(2)) == (False, True)


def test_what_is_committed_is_forgotten() -> None:
    it = order(2)
    it.commit(2)
    for seq in range(4):
        it.fold(ready(seq))
    assert it.next(0) is None
    assert it.next(2) is not None
    it.commit(4)
    assert it.pending(2) == 0


def test_other_kinds_and_settings_change_nothing() -> None:
    it = order(1)
    it.fold({**ready(None), "kind": "expired"})
    it.fold(setting("lease_ms", 5))
    assert it.next(0) is None


@pytest.mark.parametrize("record", [ready(None), {**setting("batch", 1), "setting": None}])
def test_what_dispatch_never_writes_is_refused(record: Any) -> None:
    with pytest.raises(LearnerError):
        order().fold(record)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), max_size=8), st.integers(0, 40))
def test_a_setting_holds_from_its_position_until_the_next(changes: list[tuple[int, int]], at: int) -> None:
    steps = Steps([0], [100])
    said = {0: 100}
    for position, value in changes:
        steps.set(position, value)
        said = {p: v for p, v in said.items() if p < position} | {position: value}
    assert steps.get(at) == said[max(p for p in said if p <= at)] if any(p <= at for p in said) else True
