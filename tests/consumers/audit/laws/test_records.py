"""What the log itself may do to a history: its first records go, its timestamps are others, and the audit says what
follows from it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from io import StringIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.consumers.audit import AuditReport
from millrace.consumers.audit.command import cost, progress
from millrace.consumers.audit.laws.records import BLIND, ENDLESS
from millrace.infra.terminal import Terminal
from tests.consumers.audit.corruptions.tally import HISTORIES
from tests.support.whole import KINDS, Whole, whole

DAY = 86_400_000_000


@cache
def history(seed: int) -> Whole:
    return whole(seed)


@cache
def report(seed: int) -> AuditReport:
    return history(seed).audit()


def test_each_kind_of_topic_has_its_sentence_or_its_violation() -> None:
    assert set(KINDS) | {"scores"} == ENDLESS | BLIND.keys()


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(HISTORIES), st.dictionaries(st.sampled_from(KINDS), st.integers(1, 40), min_size=1))
def test_a_beginning_that_is_gone_is_named(seed: int, cuts: dict[str, int]) -> None:
    """Of every partition that lost its first records: a violation where nothing may take them, else a line."""
    copy = history(seed).copy()
    starts: dict[tuple[str, int], tuple[str, int]] = {}
    for kind, count in cuts.items():
        topic = copy.topic(kind)
        for partition in range(copy.bus.partitions(topic)):
            offsets = [record.offset for record in copy.bus.read(topic, partition)][:count]
            if offsets and not (kind == "weights" and count >= len(list(copy.bus.read(topic, partition)))):
                copy.bus.delete_before(topic, partition, offsets[-1] + 1)
                starts[topic, partition] = kind, offsets[-1] + 1
    finding = copy.audit(quick=True).finding("beginnings")
    places = {(place.topic, place.partition, place.offset) for v in finding.violations for place in v.records}
    for (topic, partition), (kind, start) in starts.items():
        if kind in ENDLESS:
            assert (topic, partition, start) in places
        else:
            assert f"{topic}[{partition}] begins at offset {start}; not checked: {BLIND[kind]}" in finding.notes
    assert len(places) + len(finding.notes) == len(starts)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.sampled_from(HISTORIES), st.dictionaries(st.sampled_from(KINDS), st.integers(-DAY, DAY), min_size=1))
def test_nothing_that_was_decided_depends_on_the_timestamps_of_the_log(seed: int, shifts: dict[str, int]) -> None:
    """Folded again, a history whose timestamps were moved is the same history."""
    copy = history(seed).copy()
    for kind, shift in shifts.items():
        for log in copy.bus.logs[copy.topic(kind)]:
            log.entries = [entry and replace(entry, timestamp=entry.timestamp + shift) for entry in log.entries]
    assert copy.audit().as_json() == report(seed).as_json()


def test_an_audit_without_a_terminal_says_how_far_it_is() -> None:
    out = StringIO()
    with progress(Terminal(file=out, width=80), lines=True) as watch:
        for done in (1, 2, 3):
            watch("reading events[0]", done, 3)
    assert out.getvalue() == "audit: reading events[0], 1 of 3\n", "further lines come seconds later"


def test_the_cost_is_for_a_thousand_events() -> None:
    audited = report(HISTORIES[0])
    events = audited.records["events"]
    assert f"{2000 / events:.2f} s for a thousand events" in cost(audited, 2.0)
