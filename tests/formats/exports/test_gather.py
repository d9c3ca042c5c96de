"""Which version trained a trajectory is found by its place, whatever numbers the ledger holds."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.formats.exports.gather import TrainingVersions
from millrace.infra.log.base import Place

MOST = 2**63 - 1


def entry(version: int, *offsets: int, lost: str | None = None) -> Any:
    places = [{"topic": "t", "partition": 0, "offset": offset} for offset in offsets]
    return {"version": version, "groups": [{"trajectories": places, "lost": lost}]}


@pytest.mark.parametrize("odd", [2**31, MOST, -MOST - 1])
def test_any_number_is_held(odd: int) -> None:
    known = TrainingVersions("t", [entry(1, 5), entry(odd, 7, odd), entry(2, 9, lost="gone")])
    assert [known.version(Place("t", 0, offset)) for offset in (5, 7, odd, 9, 6)] == [1, odd, odd, None, None]
    assert known.version(Place("other", 0, 5)) is None
