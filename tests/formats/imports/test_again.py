"""A file that comes again, longer, shorter, in another order, after a kill: only rows that are new are new episodes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millrace.formats.imports import run as importing
from tests.formats.imports.test_import import _dying, brought, small, told
from tests.support.imported import ASKED, ROWS, SAYS, TALK, write

KINDS: list[dict[str, Any]] = [
    {"messages": TALK, "reward": 0.25},
    {"messages": TALK, "reward": 0.5},
    {"messages": [*ASKED, SAYS]},
    {"messages": [*ASKED, SAYS], "timestamp": "2024-05-01T10:00:00Z"},
]
files = st.lists(st.lists(st.integers(0, len(KINDS) - 1), min_size=1, max_size=5), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=files, size=st.integers(1, 30), deaths=st.lists(st.integers(1, 30), max_size=3), seed=st.integers(0, 99))
def test_a_row_is_as_often_an_episode_as_the_import_that_has_it_most_often_says(
    files: list[list[int]], size: int, deaths: list[int], seed: int, tmp_path: Path
) -> None:
    """Imported one file after the other, some cut off by a death; the other file is given in two parts."""
    most = Counter[int]()
    for kinds in files:
        most |= Counter(kinds)
    paths = [write(tmp_path / f"{at}", [KINDS[kind] for kind in kinds]) for at, kinds in enumerate(files)]
    union = sorted(most.elements(), key=lambda kind: (kind * seed) % 5)
    parts = [union[: len(union) // 2], union[len(union) // 2 :]] if len(union) > 1 else [union]
    at_once = [write(tmp_path / f"part{at}", [KINDS[kind] for kind in part]) for at, part in enumerate(parts)]
    before, importing.RECORDS = importing.RECORDS, size
    try:
        with small(seed) as world:
            for path, nth in zip(paths, deaths, strict=False):
                with _dying(nth):
                    brought(world, path)
                world.drain()
            for path in paths:
                brought(world, path)
                world.drain()
            found = told(world)
            assert world.decoded("dead-letters") == []
        with small(seed) as world:
            brought(world, *at_once)
            world.drain()
            assert found == told(world)
            assert len([one for one in found if one.get("kind") == "episode_ended"]) == most.total()
    finally:
        importing.RECORDS = before


@pytest.mark.parametrize("layout", ROWS)
def test_a_file_that_has_grown_keeps_the_names_of_what_it_had(layout: str, tmp_path: Path) -> None:
    """In every layout; rows that other rows stand before."""
    path = tmp_path / "rows"
    with small() as world:
        brought(world, write(path, ROWS[layout]), layout=layout)
        world.drain()
        before = told(world)
        text = orjson.dumps(ROWS[layout]).replace(b"It rains", b"It pours").replace(b"0af7651916", b"2af7651916")
        others = orjson.loads(text)
        brought(world, write(path, [*others, *ROWS[layout]]), layout=layout)
        world.drain()
        after = told(world)
        assert len(after) == 2 * len(before)
        assert all(one in after for one in before)
