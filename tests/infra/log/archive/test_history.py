"""Topic and archive are one history: whatever retention takes, every reading is what it was before."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.infra.errors import ArchiveError, TopicError
from millrace.infra.log.archive.archive import Archive
from millrace.infra.log.archive.archiver import Archiver, is_archived
from millrace.infra.log.archive.bus import ArchivedBus
from millrace.infra.log.base import Bus, Outgoing, Place, Record
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.memory.bus import MemoryBus
from millrace.schemas import codec

TOPIC = "n.events"
LATE = 1e9
"""seconds: later than any record of these tests"""
values = st.none() | st.binary(max_size=300)
headers = st.dictionaries(st.text(max_size=5), st.binary(max_size=20), max_size=3)
written = st.tuples(st.integers(0, 1), st.binary(max_size=20), values, headers, st.booleans())


@pytest.fixture
def folder() -> Iterator[Path]:
    """For tests that run many times: pytest's own folder would be shared by all their runs."""
    with TemporaryDirectory() as made:
        yield Path(made)


def fill(bus: MemoryBus, records: list[tuple[int, bytes, bytes | None, dict[str, bytes], bool]]) -> None:
    """Each record in a transaction of its own, committed or not: markers and aborted ones leave holes."""
    with bus.transactor("t") as transactor:
        for partition, key, value, head, kept in records:
            transactor.begin()
            transactor.send(Outgoing(TOPIC, key, value, head, partition))
            if kept:
                transactor.commit({}, None)
            else:
                transactor.abort()


def clocked(times: list[int]) -> MemoryBus:
    """A bus whose records have these times (micros), again and again: producers' clocks need not rise."""
    ticks = itertools.cycle(times or [0])
    return MemoryBus({TOPIC: 2}, clock=lambda: next(ticks))


def archiver(bus: Bus, root: Path | str, *, size: int = 64 << 20, claims: ClaimStore | None = None) -> Archiver:
    store = claims or ClaimStore("memory://none")
    return Archiver(bus, Archive(str(root)), "n", store, segment_bytes=size, close_s=0, clock=lambda: LATE)


def everything(bus: Bus, partition: int) -> list[Record]:
    return list(bus.read(TOPIC, partition))


@pytest.mark.slow
@settings(deadline=None)
@given(
    st.lists(written, max_size=30),
    st.lists(written, max_size=8),
    st.lists(st.integers(0, 1000), max_size=7),
    st.integers(1, 2000),
    st.integers(0, 100),
    st.integers(0, 1000),
)
def test_what_retention_takes_is_still_read(
    records: list[tuple[int, bytes, bytes | None, dict[str, bytes], bool]],
    more: list[tuple[int, bytes, bytes | None, dict[str, bytes], bool]],
    times: list[int],
    size: int,
    cut: int,
    moment: int,
) -> None:
    with TemporaryDirectory() as root:
        whole = clocked(times)
        fill(whole, records)
        kept = list(archiver(whole, root, size=size).run())
        assert list(archiver(whole, root, size=size).run()) == [], "nothing is archived twice"
        fill(whole, more)
        archive = Archive(root)
        for partition in range(2):
            shelf = archive.shelf(TOPIC, partition)
            before = everything(whole, partition)
            covered = shelf.end or 0 if shelf else 0
            since = {at: whole.since(TOPIC, at) for at in (moment, 0)}
            whole.delete_before(TOPIC, partition, min(cut, covered))
            both = ArchivedBus(whole, archive)
            assert both.starts(TOPIC)[partition] == 0
            assert everything(both, partition) == before
            middle = len(before) // 2
            start = before[middle].offset if before else 0
            assert list(both.read(TOPIC, partition, start)) == before[middle:]
            assert list(both.read(TOPIC, partition, 1, start)) == [r for r in before[:middle] if r.offset >= 1]
            places = [Place(TOPIC, partition, offset) for offset in range(both.ends(TOPIC)[partition])]
            at = {record.offset: record for record in before}
            assert both.fetch(places) == [at.get(place.offset) for place in places]
            for when, found in since.items():
                assert both.since(TOPIC, when)[partition] <= found[partition]
                assert all(r.timestamp < when for r in before if r.offset < both.since(TOPIC, when)[partition])
        assert sum(one.segment.records for one in kept) == sum(fate for *_, fate in records)


def test_a_hole_is_never_read_over(folder: Path) -> None:
    bus = clocked([])
    fill(bus, [(0, b"k", str(n).encode(), {}, True) for n in range(4)])
    list(archiver(bus, folder).run())
    fill(bus, [(0, b"k", str(n).encode(), {}, True) for n in range(4, 9)])
    bus.delete_before(TOPIC, 0, 12)
    list(archiver(bus, folder).run())
    both = ArchivedBus(bus, Archive(str(folder)))
    shelf = Archive(str(folder)).shelf(TOPIC, 0)
    assert shelf is not None
    assert shelf.holes() == [(8, 12)]
    assert both.starts(TOPIC)[0] == 12
    assert [r.value for r in both.read(TOPIC, 0)] == [b"6", b"7", b"8"]
    found = both.fetch([Place(TOPIC, 0, 0), Place(TOPIC, 0, 8), Place(TOPIC, 0, 12)])
    assert [r and r.value for r in found] == [b"0", None, b"6"]


def test_a_topic_that_is_gone_is_read_from_the_archive_alone(folder: Path) -> None:
    bus = clocked([5])
    fill(bus, [(n % 2, b"k", str(n).encode(), {}, True) for n in range(6)])
    list(archiver(bus, folder).run())
    both = ArchivedBus(MemoryBus(), Archive(str(folder)))
    assert both.topics("n.") == [TOPIC]
    assert (both.partitions(TOPIC), both.starts(TOPIC), both.ends(TOPIC)) == (2, {0: 0, 1: 0}, bus.ends(TOPIC))
    assert both.log_ends(TOPIC) == both.ends(TOPIC)
    assert both.since(TOPIC, 5) == {0: 0, 1: 0}
    assert both.since(TOPIC, 6) == both.ends(TOPIC)
    assert [everything(both, p) for p in (0, 1)] == [everything(bus, p) for p in (0, 1)]
    assert both.fetch([Place(TOPIC, 1, 0)]) == bus.fetch([Place(TOPIC, 1, 0)])
    with pytest.raises(TopicError):
        both.partitions("n.none")


def test_a_topic_made_anew_is_refused(folder: Path) -> None:
    first = clocked([])
    fill(first, [(0, b"k", b"old", {}, True)] * 3)
    list(archiver(first, folder).run())
    shorter, other = clocked([]), clocked([])
    fill(shorter, [(0, b"k", b"old", {}, True)])
    fill(other, [(0, b"k", b"new", {}, True)] * 5)
    for bus in (shorter, other):
        with pytest.raises(ArchiveError, match=r"made anew .*another directory"):
            list(archiver(bus, folder).run())
    both = ArchivedBus(other, Archive(str(folder)))
    assert [record and record.value for record in both.fetch([Place(TOPIC, 0, 0), Place(TOPIC, 0, 1)])] == [
        b"new",
        None,
    ]


def test_what_is_young_stays_until_it_is_old(folder: Path) -> None:
    bus = clocked([10_000_000])
    fill(bus, [(0, b"k", b"x" * 40, {}, True)] * 5)
    now = [15.0]
    made = Archiver(
        bus, Archive(str(folder)), "n", ClaimStore("memory://none"), segment_bytes=100, close_s=10, clock=lambda: now[0]
    )
    first = [one.segment.records for one in made.run()]
    assert first == [3], "a full segment is closed at any age, the rest is too young"
    now[0] = 21.0
    assert [one.segment.records for one in made.run()] == [2]


def test_claimed_bytes_outlive_their_store(folder: Path) -> None:
    store = ClaimStore(str(folder / "claims"))
    bus, root = clocked([]), str(folder / "archive")
    claim = store.store("Event", b"large" * 1000)
    value = codec.encode("Claim", claim)
    fill(bus, [(0, b"k", value, {}, True)])
    list(archiver(bus, root, claims=store).run())
    bus.delete_before(TOPIC, 0, 1)
    store.remove(claim["sha256"], LATE * 1e6)
    [record] = ArchivedBus(bus, Archive(root)).read(TOPIC, 0)
    assert record.value == value, "a record keeps its bytes, of which hashes were made"
    assert ClaimStore(str(folder / "claims"), beside=Archive(root).claim_body).resolve(record).value == b"large" * 1000


def test_what_is_never_archived() -> None:
    assert not is_archived("n.raw", raw=False)
    assert is_archived("n.raw", raw=True)
    assert not any(is_archived(f"n.{name}", raw=True) for name in ("workers", "principals", "changelog.seal"))
    assert is_archived("n.p.trajectories", raw=False)


def test_two_writers(folder: Path) -> None:
    bus = clocked([])
    with Archive(str(folder)).writing(), pytest.raises(ArchiveError, match=r"written by process \d+"):
        list(archiver(bus, folder).run())
    assert list(archiver(bus, folder).run()) == []


@pytest.mark.parametrize("scheme", ["file://", "memory://"])
def test_any_storage(scheme: str, folder: Path) -> None:
    root = f"{scheme}{folder}"
    bus = clocked([3])
    fill(bus, [(0, b"k", str(n).encode() * 100, {"h": b"x"}, True) for n in range(9)])
    before = everything(bus, 0)
    assert len(list(archiver(bus, root, size=300).run())) > 2
    bus.delete_before(TOPIC, 0, 100)
    assert everything(ArchivedBus(bus, Archive(root)), 0) == before
