"""A branch whose process dies at any call that changes a file: the next one ends with the same versions and the same
files, over the same log. `MILLRACE_EVERY_CALL=1`: at each call, else at some."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.branches import branch, events, violations
from tests.support.learners import Place

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CALLS = ("open", "fsync", "rename", "replace", "link", "unlink", "rmdir", "mkdir")
"""of the module os: pathlib, shutil and whoever writes files come by them"""
STRIDE = 1 if os.environ.get("MILLRACE_EVERY_CALL") else 25
FIRST = 5
"""calls by which the selection is kept"""
SHORT = {"steps": 3, "save_every": 1, "lr": 3e-4}


class Died(BaseException):
    """A process that is gone."""


def run(place: Place, name: str, nth: int = 0) -> int:
    """Make a branch, and die before the nth call that concerns its directory: no call behind that one has an effect,
    whoever would tidy up. Gives how many calls there were."""
    number, root = 0, f"/weights/{name}"

    def stepped(function: Any) -> Any:
        def step(*args: Any, **kwargs: Any) -> Any:
            nonlocal number
            inside = kwargs.get("dir_fd") is not None or isinstance(args[0], int)
            number += inside or any(root in os.fspath(arg) for arg in args if isinstance(arg, str | Path))
            if nth and number >= nth:
                raise Died
            return function(*args, **kwargs)

        return step

    with pytest.MonkeyPatch.context() as patch:
        for call in CALLS:
            patch.setattr(os, call, stepped(getattr(os, call)))
        branch(place.bus, place.settings, name, **SHORT)
    return number


def left(place: Place, name: str) -> tuple[list[tuple[int, str]], list[str]]:
    """Version and digest of each weight event, and the names of all files."""
    found = events(place.bus, place.settings, name)
    root = Path(found[0]["uri"]).parent
    names = sorted(str(path.relative_to(root)) for path in root.rglob("*"))
    return [(event["version"], event["digest"]) for event in found], names


def test_killed_at_every_call(place: Place) -> None:
    count = run(place, "whole")
    assert count > 100
    whole = left(place, "whole")
    assert [version for version, _ in whole[0]] == [0, 1, 2, 3]
    deaths = sorted({*range(1, FIRST + 1), *range(1, count + 1, STRIDE)})
    for nth in deaths:
        name = f"dies-{nth}"
        with pytest.raises(Died):
            run(place, name, nth)
        branch(place.bus, place.settings, name, **SHORT)
        assert left(place, name) == whole, nth
        assert violations(place.bus, place.settings, name) == []
    print(len(deaths), "deaths at", count, "calls")
