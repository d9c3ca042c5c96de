"""Topics made again from what their stages read: equal where nothing was touched, every change named by place and
field, and what is nowhere had back."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from millrace.consumers.replay.rebuild.law import DERIVED
from millrace.consumers.replay.rebuild.run import Asked, Report, rebuild
from millrace.infra.errors import ReplayError
from millrace.infra.log.archive.archive import Archive
from millrace.infra.log.archive.bus import ArchivedBus
from millrace.infra.log.base import Bus, Place, Record
from millrace.schemas import codec
from tests.support.players import POLICY
from tests.support.whole import Whole, whole
from tests.support.world import NAMESPACE


@pytest.fixture(scope="module")
def history() -> Whole:
    return whole(2)


def again(history: Whole, *kinds: str, bus: Bus | None = None, out: Path | None = None) -> Report:
    makers = {role: lambda _, s=stage: s for role, stage in history.stages.items()}
    asked = Asked(kinds or tuple(DERIVED), bool(kinds), out=out)
    return rebuild(bus or history.bus, NAMESPACE, POLICY, makers, asked)


def lying(history: Whole, kind: str) -> list[Record]:
    return list(history.records(kind))


def test_what_nobody_touched_is_equal(history: Whole) -> None:
    report = again(history)
    assert report.equal
    assert (report.notes, report.faults, report.refused) == ([], [], {})
    for kind, tally in report.tallies.items():
        assert tally.records == tally.equal == len(lying(history, kind)), kind
        assert tally.records, f"the history has no {kind}, so it shows nothing"
    assert list(report.tallies) == list(DERIVED)


@pytest.mark.parametrize("kind", DERIVED)
def test_a_lost_topic_is_had_back(history: Whole, kind: str, tmp_path: Path) -> None:
    """The topic is nowhere; it is written, and read as an archive it stands in for the one that was lost."""
    copy = history.copy()
    before = lying(copy, kind)
    del copy.bus.logs[copy.topic(kind)]
    report = again(copy, kind, out=tmp_path)
    assert report.tallies[kind].missing == len(before) == report.written[kind].records
    archive = Archive(str(tmp_path))
    both = ArchivedBus(copy.bus, archive)
    found = [r for p in range(both.partitions(copy.topic(kind))) for r in both.read(copy.topic(kind), p)]
    assert sorted((r.partition, r.key, r.value, sorted(r.headers.items())) for r in found) == sorted(
        (r.partition, r.key, r.value, sorted(r.headers.items())) for r in before
    )
