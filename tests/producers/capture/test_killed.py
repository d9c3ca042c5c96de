"""A forwarder as a process on a real broker, killed with SIGKILL at every point, while the broker refuses one entry for
good: every number arrives with one content, and in the place of the refused entry lies a gap."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import msgspec
import pytest

from millrace.infra.log.base import TopicSpec
from millrace.infra.log.kafka.bus import KafkaBus
from millrace.producers.capture.entry import Entry
from millrace.producers.capture.log import CaptureLog
from millrace.producers.capture.rejection import FILE, Note
from millrace.schemas import codec
from millrace.testing.events import Episode
from tests.producers.capture.test_rejection import capture, contents, kinds, records
from tests.support.fault_points import fault_points

pytestmark = [pytest.mark.slow, pytest.mark.kafka]
POINTS = [name for name in fault_points("producers") if name.startswith("forwarder.")]
REFUSED = 4
"""the entry that no topic takes, since a header of it is longer than a record may be"""
NUMBERS = range(9)
PATIENCE_S = 300


def run(broker: str, topic: str, folder: Path, kill: str = "") -> int:
    """The exit code of a process that sends what lies in the folder."""
    command = [sys.executable, "-m", "tests.producers.capture.forwarder_process", broker, topic, str(folder)]
    with (folder / "output.log").open("ab") as output:
        env = {**os.environ, "MILLRACE_KILL": kill}
        return subprocess.run(command, env=env, stdout=output, stderr=output, timeout=PATIENCE_S).returncode


def fill(folder: Path) -> None:
    """Two episodes, and between them an entry whose header is too long."""
    log = CaptureLog(folder / "log")
    try:
        capture(log, 1)
        event = Episode("r", group="g", source=log.identity.source).start() | {"source_seq": log.end}
        headers = {"source": log.source, "source-seq": str(log.end), "kind": "x", "long": os.urandom(20_000).hex()}
        log.append(Entry("local/g", headers, codec.encode("Event", event)))
        capture(log, 1)
        assert log.end == len(NUMBERS)
    finally:
        log.close()


def test_there_are_points_to_be_killed_at() -> None:
    assert POINTS == ["forwarder.published", "forwarder.refused"]


def test_killed_at_every_point_each_number_arrives_with_one_content(broker: str, tmp_path: Path) -> None:
    topic = f"t{uuid.uuid4().hex[:12]}"
    fill(tmp_path)
    with KafkaBus(broker) as bus:
        bus.ensure_topics([TopicSpec(topic, 1, {"max.message.bytes": "4000"})])

        def found() -> dict[int, bytes]:
            return contents(records(bus, topic))

        # Before anything is noted, then with the note alone, then behind the number that the gap was handed over with.
        assert run(broker, topic, tmp_path, "forwarder.published") == -signal.SIGKILL
        assert not (tmp_path / "log" / FILE).exists()
        assert run(broker, topic, tmp_path, "forwarder.refused") == -signal.SIGKILL
        notes = msgspec.json.decode((tmp_path / "log" / FILE).read_bytes(), type=list[Note])
        assert [note.seq for note in notes] == [REFUSED]
        assert REFUSED not in found()
        assert run(broker, topic, tmp_path, "forwarder.published:3") == -signal.SIGKILL
        assert run(broker, topic, tmp_path) == 0, (tmp_path / "output.log").read_text()[-2000:]
        arrived = found()
    assert sorted(arrived) == list(NUMBERS)
    assert [seq for seq, kind in kinds(arrived).items() if kind == "gap"] == [REFUSED]
