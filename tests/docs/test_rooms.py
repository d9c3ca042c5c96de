"""The drawing of the imports shows what is imported today, and no arrow goes up or round."""

from __future__ import annotations

import re

from tests.docs.rooms import PICTURE, PLACES, drawn, imports


def test_the_picture_shows_the_arrows_that_there_are() -> None:
    """Numbers of modules change with every commit: those that are drawn may be a little old."""
    found = drawn(imports())
    assert len(imports()) >= len(PLACES)
    numbers = re.compile(r">\d+<")
    again = "`python -m tests.docs.rooms` draws it again"
    assert numbers.sub("", PICTURE.read_text()) == numbers.sub("", found), again


def test_no_arrow_goes_up() -> None:
    assert all(PLACES[room][1] < PLACES[other][1] for room, other in imports())
