"""Topics made again from what their stages read: equal where nothing was touched, every change named by place and
field, and what is nowhere had back."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from millrace.consumers.replay.rebuild.law import WRITERS
from millrace.consumers.replay.rebuild.run import RebuildReport, RebuildRequest, rebuild
from millrace.infra.errors import ArchiveError, ReplayError
from millrace.infra.log.archive.archive import Archive
from millrace.infra.log.archive.archiver import Archiver
from millrace.infra.log.archive.bus import ArchivedBus
from millrace.infra.log.base import Bus, Outgoing, Record
from millrace.infra.log.blobs import ClaimStore
from millrace.schemas import codec
from millrace.schemas.errors import CorruptRecord
from millrace.testing.world import NAMESPACE
from tests.consumers.warehouse.ingest.test_archived import flipped
from tests.support.players import POLICY
from tests.support.whole import Whole, whole


@pytest.fixture(scope="module")
def history() -> Whole:
    return whole(2)


def again(history: Whole, *kinds: str, bus: Bus | None = None, out: Path | None = None) -> RebuildReport:
    makers = {role: lambda _, s=stage: s for role, stage in history.stages.items()}
    asked = RebuildRequest(kinds or tuple(WRITERS), bool(kinds), out=out)
    return rebuild(bus or history.bus, NAMESPACE, POLICY, makers, asked)


def lying(history: Whole, kind: str) -> list[Record]:
    return list(history.records(kind))


def test_what_nobody_touched_is_equal(history: Whole) -> None:
    report = again(history)
    assert report.equal
    assert (report.notes, report.faults, report.refusals) == ([], [], {})
    for kind, tally in report.tallies.items():
        assert tally.records == tally.equal == len(lying(history, kind)), kind
        assert tally.records, f"the history has no {kind}, so it shows nothing"
    assert list(report.tallies) == list(WRITERS)


@pytest.mark.parametrize("kind", WRITERS)
def test_a_lost_topic_is_had_back(history: Whole, kind: str, tmp_path: Path) -> None:
    """The topic is nowhere; it is written, and read as an archive it stands in for the one that was lost."""
    copy = history.copy()
    before = lying(copy, kind)
    del copy.bus.logs[copy.topic(kind)]
    report = again(copy, kind, out=tmp_path)
    assert report.tallies[kind].missing == len(before) == report.outputs[kind].records
    archive = Archive(str(tmp_path))
    both = ArchivedBus(copy.bus, archive)
    found = [r for p in range(both.partitions(copy.topic(kind))) for r in both.read(copy.topic(kind), p)]
    assert sorted((r.partition, r.key, r.value, sorted(r.headers.items())) for r in found) == sorted(
        (r.partition, r.key, r.value, sorted(r.headers.items())) for r in before
    )


@pytest.mark.parametrize("kind", [kind for kind in WRITERS if kind != "completions"])
def test_what_stands_in_for_a_lost_topic_passes_the_audit(history: Whole, kind: str, tmp_path: Path) -> None:
    """Its places are those that others name. Which of two slots wrote first to `completions` is told by times alone."""
    copy = history.copy()
    del copy.bus.logs[copy.topic(kind)]
    again(copy, kind, out=tmp_path)
    copy.bus = ArchivedBus(copy.bus, Archive(str(tmp_path)))  # type: ignore[assignment]
    report = copy.audit()
    assert report.clean, report.violations[:3]


def leaves(value: Any, at: str = "") -> Iterator[tuple[str, Any, Callable[[Any], None]]]:
    """Path, value and setter of every field that holds something which can be changed into another."""
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in list(parts):
        path = f"{at}[{key}]" if isinstance(key, int) else f"{at}.{key}" if at else key
        if isinstance(part, dict | list):
            yield from leaves(part, path)
        elif part is not None:
            yield path, part, partial(value.__setitem__, key)


def other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    return value + (b"x" if isinstance(value, bytes) else "x" if isinstance(value, str) else 1)


def altered(record: Record, draw: random.Random) -> tuple[str, bytes] | None:
    """A path in a record, and the record with another value there; None for a value that no schema takes."""
    name, decoded = codec.decode(record.value or b"")
    path, value, put = draw.choice(list(leaves(decoded)))
    put(other(value))
    try:
        return path, codec.encode_by_name(name, decoded)
    except (CorruptRecord, ValueError, OverflowError):
        return None


def replace(history: Whole, old: Record, new: Record | None) -> Whole:
    copy = history.copy()
    copy.bus.logs[old.topic][old.partition].entries[old.offset] = new
    return copy


@pytest.mark.parametrize("kind", WRITERS)
def test_an_altered_record_is_named_by_place_and_field(history: Whole, kind: str) -> None:
    record = lying(history, kind)[-1]
    name, decoded = codec.decode(record.value or b"")
    field = next(field for field in ("time", "log_time", "sealed_at", "deadline") if field in decoded)
    decoded[field] += 1
    changed = dataclasses.replace(record, value=codec.encode_by_name(name, decoded))
    tally = again(replace(history, record, changed), kind).tallies[kind]
    assert [(one.what.rpartition(": ")[2], one.place) for one in tally.differences] == [(field, record.place)]
    assert tally.differences[0].turn == record.headers["turn"].decode()


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(draw=st.randoms(use_true_random=False), kind=st.sampled_from(sorted(WRITERS)))
def test_any_altered_field_is_named_by_place(history: Whole, draw: random.Random, kind: str) -> None:
    record = draw.choice(lying(history, kind))
    changed = altered(record, draw)
    assume(changed is not None)
    assert changed is not None
    path, value = changed
    tally = again(replace(history, record, dataclasses.replace(record, value=value)), kind).tallies[kind]
    named = [one for one in tally.differences if one.place == record.place]
    assert len(named) == 1, (path, tally)
    assert path.partition(".")[0].partition("[")[0] in named[0].what
    assert (tally.different, tally.missing, tally.additional) == (1, 0, 0)


@pytest.mark.slow
@settings(deadline=None, max_examples=20)
@given(draw=st.randoms(use_true_random=False), kind=st.sampled_from(sorted(WRITERS)))
def test_another_key_or_header_is_named(history: Whole, draw: random.Random, kind: str) -> None:
    record = draw.choice(lying(history, kind))
    how = draw.choice(
        ({"key": record.key + b"x"}, {"headers": {**record.headers, "x": b""}}, {"value": b"none of ours"})
    )
    tally = again(replace(history, record, dataclasses.replace(record, **how)), kind).tallies[kind]
    assert [one.place for one in tally.differences] == [record.place]


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(draw=st.randoms(use_true_random=False), kind=st.sampled_from(sorted(WRITERS)))
def test_a_record_left_out_is_had_back_at_its_place(history: Whole, draw: random.Random, kind: str) -> None:
    record = draw.choice(lying(history, kind))
    copy = replace(history, record, None)
    with TemporaryDirectory() as out:
        report = again(copy, kind, out=Path(out))
        tally = report.tallies[kind]
        assert (tally.missing, tally.different, tally.additional) == (1, 0, 0)
        assert tally.equal == tally.records == len(lying(history, kind)) - 1
        assert tally.differences[0].turn == record.headers["turn"].decode()
        found = list(Archive(out).records(record.topic, record.partition, 0, 1 << 40))
    before = [each for each in lying(history, kind) if each.partition == record.partition]
    assert [r for r in found if r.value != record.value] == [r for r in before if r.value != record.value]
    assert by_slot(found) == by_slot(before)
    assert [r.offset for r in found] == sorted({r.offset for r in found})


def by_slot(records: list[Record]) -> dict[bytes, list[tuple[bytes, bytes | None, dict[str, bytes]]]]:
    """What each slot wrote, in its order: of two slots that wrote at one time nobody says which came first."""
    found: dict[bytes, list[tuple[bytes, bytes | None, dict[str, bytes]]]] = {}
    for each in records:
        slot = each.headers["turn"].rpartition(b"/")[0]
        found.setdefault(slot, []).append((each.key, each.value, dict(each.headers)))
    return found


@pytest.mark.slow
@settings(deadline=None, max_examples=20)
@given(draw=st.randoms(use_true_random=False), kind=st.sampled_from(sorted(WRITERS)))
def test_a_record_too_many_is_named(history: Whole, draw: random.Random, kind: str) -> None:
    record = draw.choice(lying(history, kind))
    headers = draw.choice((record.headers, {}, {"turn": b"seal/0/999999"}, {"turn": b"none"}))
    copy = history.copy()
    with copy.bus.publisher() as publisher:
        out = Outgoing(record.topic, record.key, record.value, headers, record.partition)
        place = publisher.publish(out).result()
    tally = again(copy, kind).tallies[kind]
    assert (tally.additional, tally.missing) == (1, 0)
    named = [one.place for one in tally.differences]
    assert place in named or headers == record.headers
    assert len(named) <= 2


# -- what is nowhere


def test_a_range_that_is_nowhere_is_refused_with_what_is_left(history: Whole) -> None:
    copy = history.copy()
    topic = copy.topic("raw")
    cut = copy.bus.ends(topic)[0] // 2
    copy.bus.delete_before(topic, 0, cut)
    said = rf"{topic}\[0\]: offsets 0 to {cut - 1} are neither in the topic nor in the archive; what is left begins at "
    with pytest.raises(ReplayError, match=f"{said}{cut}"):
        again(copy, "events")
    report = again(copy)
    assert list(report.refusals) == ["events"]
    assert not report.equal
    assert report.tallies["trajectories"].equal == len(lying(history, "trajectories"))
    letters = report.tallies["dead-letters"]
    assert letters.equal + letters.untried == letters.records
    assert letters.untried


def test_turns_that_are_gone_are_refused(history: Whole) -> None:
    copy = history.copy()
    topic = copy.topic("turns.seal")
    copy.bus.delete_before(topic, 1, 3)
    with pytest.raises(ReplayError, match=rf"{topic}\[1\]: offsets 0 to 2 are neither .* what is left begins at 3"):
        again(copy, "trajectories")
    del copy.bus.logs[topic]
    with pytest.raises(ReplayError, match=f"{topic} is neither in the log nor in the archive"):
        again(copy, "trajectories")


def test_a_source_that_is_gone_or_too_short_is_refused(history: Whole) -> None:
    copy = history.copy()
    topic = copy.topic("events")
    last = max(record.offset for record in lying(history, "events") if record.partition == 0)
    del copy.bus.logs[topic][0].entries[last:]
    with pytest.raises(ReplayError, match=rf"{topic}\[0\]: offsets \d+ to \d+ are neither .* what is left ends at \d+"):
        again(copy, "trajectories")
    del copy.bus.logs[topic]
    with pytest.raises(ReplayError, match=r"nothing of it is left"):
        again(copy, "trajectories")


def test_what_only_the_archive_has_is_folded_and_a_flipped_byte_named(history: Whole, tmp_path: Path) -> None:
    copy = history.copy()
    topic, store = copy.topic("events"), ClaimStore("memory://none")
    archiver = Archiver(copy.bus, Archive(str(tmp_path)), NAMESPACE, store, close_s=0, clock=lambda: 1e12)
    for kept in list(archiver.run()):
        copy.bus.delete_before(kept.topic, kept.partition, kept.segment.end)
    assert not list(copy.bus.read(topic, 0))
    assert again(copy, bus=ArchivedBus(copy.bus, Archive(str(tmp_path)))).equal
    segment = flipped(tmp_path / topic)
    with pytest.raises(ArchiveError, match=f"{segment} is damaged"):
        again(copy, "trajectories", bus=ArchivedBus(copy.bus, Archive(str(tmp_path))))


def test_what_retention_took_is_had_back(history: Whole, tmp_path: Path) -> None:
    """The beginning of a topic that its sources outlived is no difference."""
    copy = history.copy()
    topic = copy.topic("trajectories")
    before = lying(history, "trajectories")
    middle = before[len(before) // 3]
    copy.bus.delete_before(topic, middle.partition, middle.offset)
    gone = sum(1 for r in before if r.partition == middle.partition and r.offset < middle.offset)
    report = again(copy, "trajectories", out=tmp_path)
    tally = report.tallies["trajectories"]
    assert report.equal
    assert (tally.forgotten, tally.equal) == (gone, len(before) - gone)
    found = [r.value for p in range(2) for r in Archive(str(tmp_path)).records(topic, p, 0, 1 << 40)]
    assert found == [r.value for r in before]


def test_a_directory_that_is_taken(history: Whole, tmp_path: Path) -> None:
    again(history, "grants", out=tmp_path)
    with pytest.raises(ReplayError, match=r"holds segments of .*grants: name another directory"):
        again(history, "grants", out=tmp_path)
    assert again(history, "evaluations", out=tmp_path).outputs["evaluations"].records
