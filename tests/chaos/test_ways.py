"""No kill point of the code is forgotten."""

from __future__ import annotations

from tests.chaos.__main__ import ELSEWHERE, points
from tests.chaos.ways import WAYS, every_point, points_of


def test_every_point_is_killed_at_somewhere() -> None:
    ways = [points_of(way) for way in WAYS]
    assert all(ways)
    known = [*points(""), *(name for way in ways for name in way)]
    assert len(set(known)) == len(known), "a point lies on one way"
    assert set(every_point()) - set(known) == {name for name in every_point() if name.startswith(ELSEWHERE)}
