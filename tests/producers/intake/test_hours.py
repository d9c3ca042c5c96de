"""How long the inlets of their own hours keep raw content: as `docs/governance.md` says."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from millrace.infra.config import load
from millrace.infra.log.memory.bus import MemoryBus
from millrace.infra.process.net import free_ports
from millrace.producers.capture.entry import Entry
from millrace.producers.capture.log import CaptureLog
from millrace.producers.capture.segments import segments
from millrace.producers.intake import sender as sending
from millrace.producers.intake.otlp.receiver import KEPT_S as FOUR_HOURS
from millrace.producers.intake.otlp.serve import open_receiver
from millrace.producers.intake.sender import ReportSender
from millrace.producers.intake.spool import KEPT_S as A_DAY
from millrace.producers.intake.spool import Spool
from millrace.producers.intake.spool import open_log as log_in

PAGE = Path(__file__).parents[3] / "docs" / "governance.md"
HOUR_S = 3600.0


def test_the_page_says_how_long() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith(("| directory of", "| spool of"))]
    assert (FOUR_HOURS, A_DAY) == (4 * HOUR_S, 24 * HOUR_S)
    assert ["four hours" in rows[0], "a day" in rows[1]] == [True, True]


def aged(log: CaptureLog, age_s: float) -> Path:
    """The only file of a log, written so long ago."""
    (file,) = segments(log.folder)
    written = time.time() - age_s
    os.utime(file.path, (written, written))
    return file.path


@pytest.mark.parametrize("hours", [1, 24])
@pytest.mark.parametrize("early", [True, False])
def test_the_receiver_forgets_spans_after_four_hours(tmp_path: Path, hours: int, *, early: bool) -> None:
    settings = load(flags={"home": str(tmp_path), "topics.short_hours": hours})
    receiver, forwarder = open_receiver(settings, MemoryBus())
    receiver.spans.append(Entry("t", {}, b"words"))
    receiver.spans.release(receiver.spans.end, 0)
    file = aged(receiver.spans, FOUR_HOURS - 60 if early else FOUR_HOURS + 60)
    receiver.tend(0)
    assert file.exists() == early
    assert receiver.spans.segment_s == FOUR_HOURS / 24
    assert receiver.events.segment_s == max(hours * HOUR_S, FOUR_HOURS) / 24
    assert forwarder.retention_s == max(hours * HOUR_S, FOUR_HOURS)
    receiver.close()


def test_what_an_ended_process_left_is_gone_after_a_day_though_no_gateway_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "LOOK_S", 0.0)
    (closed,) = free_ports(1)
    folders = []
    for age_s in (A_DAY + 60, A_DAY - 60):
        log = log_in(tmp_path / f"left{len(folders)}")
        log.append(Entry("mr-id.word", {"source": "s", "url": f"http://127.0.0.1:{closed}/v1"}, b'{"words":1}'))
        aged(log, age_s)
        log.close()
        folders.append(log.folder)
    spool, told = Spool(tmp_path), list[str]()
    assert spool.put({"kind": "tool_result", "content": "x"}, "mr-id.word", f"http://127.0.0.1:{closed}/v1")
    sender = ReportSender(spool, told.append)
    sender.start()
    deadline = time.monotonic() + 60
    while folders[0].exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    sender.close(5)
    assert [folder.exists() for folder in folders] == [False, True]
    assert [text for text in told if "older than a day" in text] == [
        f"1 captured events are lost: {folders[0]} is older than a day"
    ]
