"""What the study of layouts claims of a ledger, and that it holds for a learner that joins while another trains."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest

from benchmarks.layout_runs import BATCH, SIZE, Join, record, train
from benchmarks.study_layouts import faulty_shares, first_after, share_of, without


def row(version: int, *tokens: int, time: float = 0.0, samples: int = 4, **changes: Any) -> dict[str, Any]:
    """A ledger entry whose ranks computed `tokens`; rank n's member listens on port n."""
    ranks = [
        {"rank": rank, "member": f"learner@h:{rank}-x", "samples": samples, "tokens": one}
        for rank, one in enumerate(tokens)
    ]
    return {
        "version": version,
        "layout": f"torch:d{len(tokens)}",
        "ranks": ranks,
        "metrics": {"tokens_computed": float(sum(tokens))},
        "time": int(time * 1e6),
        **changes,
    }


def test_an_entry_whose_shares_do_not_make_the_batch_is_named() -> None:
    rows = [
        row(1, 10, 20),
        row(2, 30, samples=8),
        row(3, 10, 0),
        row(4, 10, 20, layout="torch:d3"),
        row(5, 10, 20, samples=3),
        row(6, 10, 20, metrics={"tokens_computed": 31.0}),
    ]
    assert faulty_shares(rows, 8) == [3, 4, 5, 6]


def test_a_joiner_is_looked_for_in_the_first_version_after_it_was_agreed_upon() -> None:
    join = Join(":1-", asked=1.5, agreed=2.5)
    rows = [row(1, 9, time=1), row(2, 9, time=2), row(3, 5, 4, time=3), row(4, 5, 4, time=4)]
    found = first_after(rows, join.agreed)
    assert found is rows[2]
    assert share_of(found, join) == 4
    assert without(rows, join) == 1
    assert first_after(rows, 5.0) is None
    assert without(rows[:2], join) == 1


@pytest.mark.slow
@pytest.mark.kafka
@pytest.mark.timeout(600)
def test_a_joiner_has_a_share_at_the_next_boundary(tmp_path: Path, broker: str) -> None:
    recording = record(tmp_path, broker, f"t{uuid.uuid4().hex[:8]}", 12)
    run = train(recording, "run", [(0, 1), (2, 2)])
    rows = run.rows[1:]
    assert [one["version"] for one in rows] == list(range(1, 13))
    assert faulty_shares(rows, BATCH * SIZE) == []
    (join,) = run.joins
    found = first_after(rows, join.agreed)
    assert found is not None
    assert share_of(found, join) > 0
    assert all(share_of(later, join) > 0 for later in rows[found["version"] :])
