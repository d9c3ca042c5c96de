"""An export reads topics and archive as one history, and refuses what neither has."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.formats.exports import export_from
from millrace.formats.exports.run import ExportSummary
from millrace.formats.exports.select import Selection
from millrace.infra.errors import ArchiveError, ExportError
from millrace.infra.log.base import Bus
from millrace.infra.log.history.reader import History
from tests.consumers.test_archive import archived
from tests.consumers.warehouse.ingest.test_archived import flipped
from tests.support.conversations import Conversations
from tests.support.history_log import NS
from tests.support.history_records import POLICY

GONE = "are neither in the topic nor in the archive; what is left begins at"


def exported(bus: Bus, out: Path, *, accept_gaps: bool = False) -> ExportSummary:
    return export_from(History(bus, NS, POLICY), "jsonl", out, Selection(), "local", accept_gaps=accept_gaps)


def test_a_log_that_was_cut_gives_the_same_file(tmp_path: Path) -> None:
    made = Conversations(1)
    whole = exported(made.bus, tmp_path / "whole")
    assert whole.exported
    both = archived(made, tmp_path / "archive")
    assert not list(made.bus.read(made.topic("events"), 0))
    cut = exported(both, tmp_path / "cut")
    assert (cut.digest, cut.refused, cut.gone) == (whole.digest, whole.refused, [])


def test_calls_that_only_the_archive_has_are_served(tmp_path: Path) -> None:
    made = Conversations(1)
    whole = exported(made.bus, tmp_path / "whole")
    both = archived(made, tmp_path / "archive", only="events")
    assert exported(both, tmp_path / "served").digest == whole.digest
    assert exported(made.bus, tmp_path / "refused").refused["events_gone"] == whole.exported


def test_trajectories_that_are_nowhere_are_refused_with_what_is_left(tmp_path: Path) -> None:
    made = Conversations(1)
    topic = made.topic("trajectories")
    made.bus.delete_before(topic, 0, 3)
    with pytest.raises(ExportError, match=rf"{topic}\[0\]: offsets 0 to 2 {GONE} 3\. --what-is-left"):
        exported(made.bus, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    summary = exported(made.bus, tmp_path / "out", accept_gaps=True)
    assert summary.gone == [f"{topic}[0]: offsets 0 to 2 {GONE} 3"]
    assert summary.exported


def test_a_flipped_byte_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    made = Conversations(1)
    both = archived(made, tmp_path / "archive")
    segment = flipped(tmp_path / "archive" / made.topic("trajectories"))
    with pytest.raises(ArchiveError, match=f"{segment} is damaged"):
        exported(both, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["archive"]
