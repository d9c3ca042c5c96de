"""What is told of a topic under retention: it may forget at any moment, also between two questions."""

from __future__ import annotations

from collections.abc import Sequence
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.consumers.warehouse.ingest.topic_identity import Tip, recreation_reason, tip_of
from millrace.infra.errors import ArchiveError
from millrace.infra.log.archive.archive import Archive
from millrace.infra.log.archive.archiver import Archiver
from millrace.infra.log.base import Outgoing, Place, Record
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.memory.bus import MemoryBus

TOPIC, RECORDS = "t.events", 6


class Forgetful(MemoryBus):
    """Forgets everything before an offset right before its nth answer. `calls`: answers that it gave."""

    def __init__(self, forgets: int, nth: int, salt: int = 0) -> None:
        super().__init__({TOPIC: 1}, clock=lambda: 7)
        with self.publisher() as publisher:
            for n in range(RECORDS):
                publisher.publish(Outgoing(TOPIC, b"k", b"%d" % (n + salt)))
        self.forgets, self.nth, self.calls = forgets, nth, 0

    def _asked(self) -> None:
        self.calls += 1
        if self.calls == self.nth:
            self.delete_before(TOPIC, 0, self.forgets)

    def starts(self, topic: str) -> dict[int, int]:
        self._asked()
        return super().starts(topic)

    def ends(self, topic: str) -> dict[int, int]:
        self._asked()
        return super().ends(topic)

    def fetch(self, places: Sequence[Place]) -> list[Record | None]:
        self._asked()
        return super().fetch(places)


@given(tip=st.integers(0, RECORDS - 1), forgets=st.integers(0, RECORDS), nth=st.integers(1, 6))
def test_a_topic_that_forgets_is_not_made_anew(tip: int, forgets: int, nth: int) -> None:
    """And one that was, and is not forgotten, is."""
    (record,) = MemoryBus.fetch(Forgetful(0, 0), [Place(TOPIC, 0, tip)])
    assert record is not None
    known = Tip(tip, tip_of(record))
    assert recreation_reason(Forgetful(forgets, nth), (TOPIC, 0), tip + 1, known) == ""
    assert "holds another record" in recreation_reason(Forgetful(0, 0, salt=3), (TOPIC, 0), tip + 1, known)


@given(forgets=st.integers(0, RECORDS), nth=st.integers(1, 9))
def test_an_archive_goes_on_with_a_topic_that_forgets(forgets: int, nth: int) -> None:
    with TemporaryDirectory() as folder:

        def kept(bus: MemoryBus) -> int:
            claims = ClaimStore(f"{folder}/claims")
            return sum(1 for _ in Archiver(bus, Archive(f"{folder}/kept"), "t", claims, close_s=0.0).run())

        assert kept(Forgetful(0, 0)) == 1
        kept(Forgetful(forgets, nth))
        with pytest.raises(ArchiveError, match="was made anew"):
            kept(Forgetful(0, 0, salt=3))
