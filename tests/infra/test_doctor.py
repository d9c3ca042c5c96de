"""The doctor on a healthy broker, and on storage that is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.bus.connect import connect
from infra.config import load
from infra.doctor import Answer, examine
from infra.services import vllm


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


@pytest.mark.parametrize(
    ("device", "gpu", "answer"),
    [
        ("auto", False, Answer("vllm runs on", "ok", "cpu")),
        ("auto", True, Answer("vllm runs on", "warning", vllm.IDLE_GPU)),
        ("cpu", True, Answer("vllm runs on", "ok", "cpu")),
    ],
)
def test_a_gpu_that_stays_idle_is_a_warning(
    device: str, gpu: bool, answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "_there", lambda package: package == vllm.CPU_BUILD)
    monkeypatch.setattr(vllm, "usable", lambda: gpu)
    answers = examine(load(flags={"engine.device": device, "kafka.local": False}))
    assert next(one for one in answers if one.question == answer.question) == answer


def test_a_build_that_does_not_fit_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "_there", lambda package: package == vllm.CPU_BUILD)
    answers = examine(load(flags={"engine.device": "cuda", "kafka.local": False}))
    answer = next(one for one in answers if one.question == "vllm runs on")
    assert answer.word == "bad"
    assert "make setup ENGINE=gpu" in answer.said


@pytest.mark.parametrize("objects", ["file", "nosuch://x/y", "memory://x"])
def test_storage_that_cannot_hold_weights(objects: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    place = objects if "://" in objects else str(tmp_path / objects)
    made = load(flags={"objects": place, "kafka.bootstrap": "127.0.0.1:1", "engine.local": False})
    answers = examine(made)
    storage = next(answer for answer in answers if answer.question == "shared storage")
    assert storage.word == "bad"
