"""A damaged archive is named, with segment and offset, and never read as something else."""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.infra import durable
from millrace.infra.errors import ArchiveError
from millrace.infra.log.archive.archive import MANIFEST, Archive
from millrace.infra.log.archive.shelf import Segment, Shelf, decode, encode
from millrace.infra.log.base import Outgoing, Record
from millrace.infra.log.memory.bus import MemoryBus
from tests.infra.log.archive.test_history import TOPIC, archiver


def archive_in(root: str, count: int = 40) -> list[Record]:
    """An archive of some segments; gives what is in it."""
    bus = MemoryBus({TOPIC: 1}, clock=lambda: 7)
    with bus.publisher() as publisher:
        for n in range(count):
            publisher.publish(Outgoing(TOPIC, b"key%d" % n, b"%d " % n * 50, {"h": b"%d" % n}, 0))
    list(archiver(bus, root, size=4000).run())
    return list(bus.read(TOPIC, 0))


def read(root: str) -> list[Record]:
    return list(Archive(root).records(TOPIC, 0, 0, 1000))


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(st.data())
def test_any_flipped_bit_is_named(data: st.DataObject) -> None:
    with TemporaryDirectory() as root:
        whole = archive_in(root)
        folder = Path(root) / TOPIC / "0"
        path = data.draw(st.sampled_from(sorted(folder.glob("*.parquet"))))
        stored = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(stored) - 1))
        stored[at] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(stored)
        with pytest.raises(ArchiveError, match=re.escape(str(path))):
            read(root)
        others = [s for s in sorted(folder.glob("*.parquet")) if s != path]
        assert others, "there is more than one segment, and the rest reads well"
        shelf = Archive(root).shelf(TOPIC, 0)
        assert shelf is not None
        sound = [segment for segment in shelf.segments if segment.file != path.name]
        found = [row.record for segment in sound for row in Archive(root).rows(TOPIC, 0, segment)]
        assert found == [r for r in whole if any(s.first <= r.offset < s.end for s in sound)]


def test_an_altered_record_is_named_by_its_offset(tmp_path: Path) -> None:
    archive_in(str(tmp_path))
    path = sorted((tmp_path / TOPIC / "0").glob("*.parquet"))[1]
    table = pq.read_table(path)
    rows = table.to_pylist()
    rows[3]["value"] = b"forged"
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)
    with pytest.raises(ArchiveError, match=rf"{re.escape(path.name)} is damaged at offset {rows[3]['offset']}:"):
        read(str(tmp_path))


def test_a_segment_that_is_gone(tmp_path: Path) -> None:
    archive_in(str(tmp_path))
    first, *_ = sorted((tmp_path / TOPIC / "0").glob("*.parquet"))
    first.unlink()
    with pytest.raises(ArchiveError, match=rf"{re.escape(str(first))} is gone, with offsets 0 to \d+: restore"):
        read(str(tmp_path))


@pytest.mark.parametrize(
    ("manifest", "said"),
    [
        (b"", "is no manifest"),
        (b"{", "is no manifest"),
        (b"\xff", "is no manifest"),
        (b"[]", "is no manifest"),
        (msgspec.json.encode(Shelf("n.t", 0, 1, release=9)), "newer release"),
        (encode(Shelf("n.t", 0, 1, (Segment(0, 9, 1, 1, "", 0, 0), Segment(5, 7, 1, 1, "", 0, 0)))), "overlap"),
    ],
)
def test_a_bad_manifest(manifest: bytes, said: str, tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match=said):
        decode(manifest, "m")
    archive_in(str(tmp_path))
    (tmp_path / TOPIC / "0" / MANIFEST).write_bytes(manifest)
    with pytest.raises(ArchiveError, match=said):
        read(str(tmp_path))


def test_a_full_disk_leaves_what_was_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The write of a manifest fails: the segment is not kept, and is made again."""
    bus = MemoryBus({TOPIC: 1}, clock=lambda: 7)
    with bus.publisher() as publisher:
        publisher.publish(Outgoing(TOPIC, b"k", b"v", {}, 0))

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(durable, "write", full)
        with pytest.raises(ArchiveError, match=r"No space left .*make room"):
            list(archiver(bus, tmp_path).run())
    assert Archive(str(tmp_path)).shelf(TOPIC, 0) is None
    assert [one.segment.records for one in archiver(bus, tmp_path).run()] == [1]
    assert [path.name for path in (tmp_path / TOPIC / "0").iterdir() if path.name.startswith(".")] == []
