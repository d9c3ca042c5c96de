"""The production leader under generated schedules: whatever becomes of a version on its way while the next step trains,
and whoever is killed when, the ledger is dense and has the bytes of a run that nothing befell."""

from __future__ import annotations

import tempfile
import threading
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millrace.infra import faults
from millrace.infra.errors import FencedError, RefusedError, RegroupError, UnreachableError
from tests.support.feed import feed
from tests.support.learners import Place, entries

VERSIONS = 4
MOST_STARTS = 8


class Killed(BaseException):
    """Stands in for SIGKILL."""


FATES = {
    "refused": RefusedError("the group moved on"),
    "fenced": FencedError("another leads"),
    "unknown": UnreachableError("the broker did not answer"),
    "killed": Killed(),
}
BESIDE = ("checkpoint.after_rename", "learner.before_begin", "learner.before_commit", "learner.after_commit")
"""points of the thread that writes and commits"""
STEP = ("learner.after_step", "learner.after_gather")


def fed(folder: Path) -> Place:
    place = Place(folder, **{"learner.keep": 1})
    feed(place.bus, place.settings, range(4 * VERSIONS))
    return place


def ledger(place: Place) -> list[tuple[int, int, int, str]]:
    return [(e["version"], e["seq_lo"], e["seq_hi"], e["digest"]) for e in entries(place.bus, place.settings)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, int, int, str]]:
    place = fed(tmp_path_factory.mktemp("whole") / "place")
    place.learn(VERSIONS)
    place.bus.close()
    return ledger(place)


BLOWS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(BESIDE[1:]), st.integers(1, 6), st.sampled_from(sorted(FATES))),
        st.tuples(st.just(BESIDE[0]), st.integers(1, 6), st.just("killed")),
        st.tuples(st.sampled_from(STEP), st.integers(1, 6), st.sampled_from(["killed", "breaks"])),
    ),
    max_size=5,
)


@given(blows=BLOWS, late=st.sets(st.integers(1, 6)))
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.slow
def test_any_schedule_gives_the_ledger_of_none(
    whole: list[tuple[int, int, int, str]], blows: list[tuple[str, int, str]], late: set[int]
) -> None:
    """late: the publications, by number, that begin only once the next step has trained, if there is one."""
    fates = {(point, nth): FATES.get(fate, RegroupError("a peer died")) for point, nth, fate in blows}
    counts: Counter[str] = Counter()
    stepped = threading.Event()

    def hook(point: str) -> None:
        counts[point] += 1
        if point == "learner.after_step":
            stepped.set()
        elif point == "learner.after_gather":
            stepped.clear()
        elif point == "learner.before_begin" and counts[point] in late:
            stepped.wait(1.0)
        error = fates.pop((point, counts[point]), None)
        if error is not None:
            raise error

    with tempfile.TemporaryDirectory() as folder:
        place = fed(Path(folder) / "place")
        before = faults.install(hook)
        try:
            for _ in range(MOST_STARTS):
                try:
                    place.learn(VERSIONS)
                except Killed:
                    continue
                break
        finally:
            faults.install(before)
        assert ledger(place) == whole
        place.bus.close()
