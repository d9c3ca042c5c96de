"""The doctor on a healthy broker, and on storage that is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.bus.connect import connect
from infra.config import load
from infra.doctor import examine


@pytest.mark.slow
@pytest.mark.kafka
def test_broker_topics_and_clock(broker: str, tmp_path: Path) -> None:
    made = load(flags={"kafka.bootstrap": broker, "namespace": "doctor", "home": str(tmp_path)})
    before = {answer.question: answer for answer in examine(made)}
    assert before["topics"].word == "bad"
    assert "millrace topics" in before["topics"].said
    with connect(made) as bus:
        bus.ensure_topics(made.layout.specs())
    after = {answer.question: answer for answer in examine(made)}
    for question in ("broker", "topics", "clock against the broker", "shared storage", "java"):
        assert after[question].word == "ok", after[question]


@pytest.mark.parametrize("objects", ["file", "nosuch://x/y"])
def test_storage_that_cannot_be_written(objects: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    place = objects if "://" in objects else str(tmp_path / objects)
    made = load(flags={"objects": place, "kafka.bootstrap": "127.0.0.1:1", "engine.local": False})
    answers = examine(made)
    storage = next(answer for answer in answers if answer.question == "shared storage")
    assert storage.word == "bad"
