"""The commands that train from files, as they are called."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from millrace.apps.cli import training
from millrace.apps.cli.main import app
from millrace.trainers.tracking.jsonl import points
from millrace.trainers.weights import checkpoint
from tests.support import lessons, tracked

pytestmark = pytest.mark.slow

SMALL = ["--steps", "2", "--batch", "4", "--lr", "1e-3", "--holdout", "0.2"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("offline")
    lessons.untrained(home / "model")
    lessons.untrained(home / "teacher", seed=1)
    lessons.write(home / "lessons.jsonl", lessons.conversations(20))
    lessons.write(home / "pairs.jsonl", lessons.preferences(20))
    lessons.write(home / "rated.jsonl", lessons.ratings(20))
    return home


@pytest.fixture(autouse=True)
def _there(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)


def call(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, list(words))
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("command", "data", "more"),
    [
        ("sft", "lessons.jsonl", []),
        ("sft", "lessons.jsonl", ["--lora-rank", "4", "--adapter-only", "--bf16"]),
        ("dpo", "pairs.jsonl", ["--reference", "teacher"]),
        ("dpo", "pairs.jsonl", ["--algorithm", "ipo", "--knob", "beta=0.2"]),
        ("dpo", "pairs.jsonl", ["--algorithm", "simpo", "--lora-rank", "2"]),
        ("dpo", "pairs.jsonl", ["--algorithm", "orpo"]),
        ("dpo", "rated.jsonl", ["--algorithm", "kto", "--knob", "desirable_weight=1.5"]),
        (
            "reward-model",
            "pairs.jsonl",
            ["--weight-decay", "0.1", "--decay", "cosine", "--lr-floor", "0.1", "--activation-checkpointing"],
        ),
        ("distill", "lessons.jsonl", ["--teacher", "teacher", "--direction", "reverse"]),
        ("distill", "lessons.jsonl", ["--teacher", "teacher", "--on-policy", "--max-tokens", "4"]),
    ],
)
def test_each_command_writes_a_version(command: str, data: str, more: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, said, complained = call(command, "--model", "model", "--data", data, "--out", str(out), *SMALL, *more)
    assert (code, complained) == (0, ""), complained
    assert f"wrote {out}/v2-" in said
    assert "batch 2 of 2  loss " in said
    (path,) = out.glob("v*")
    assert checkpoint.read(path).step == 2
    assert [point["step"] for point in points(out)] == [0, 1, 2]
    about = json.loads((out / "run.json").read_text())
    assert about["batch"] == 4
    assert str(tmp_path) not in json.dumps(about), "a run may go on in another place"


def test_rows_that_are_left_out_are_named_and_counted(tmp_path: Path) -> None:
    path = lessons.write(tmp_path / "some.jsonl", [*lessons.conversations(4), *[{"text": "x"}] * 9])
    words = ["sft", "--model", "model", "--data", str(path), "--out", str(tmp_path / "out"), "--steps", "1"]
    code, _, complained = call(*words)
    assert code == 0
    assert f"left out {path}:5: no known shape" in complained
    assert complained.count("no known shape") == 5
    assert "9 rows left out" in complained
    code, _, complained = call(*words, "--strict")
    assert code == 1
    assert complained.startswith(f"error: {path}:5: no known shape")


def test_what_is_wrong_is_one_line(tmp_path: Path) -> None:
    words = ["--model", "model", "--data", "lessons.jsonl", "--out", str(tmp_path)]
    for command, more, reason in (
        ("sft", ["--knob", "speed=3"], "no knob 'speed'"),
        ("sft", ["--knob", "speed"], "write it as key=value"),
        ("sft", ["--decay", "stairs"], "no learning rate schedule 'stairs'"),
        ("dpo", [], "no row to learn from: no known shape"),
    ):
        code, _, complained = call(command, *words, *more)
        assert code == 1
        last = complained.splitlines()[-1]
        assert last.startswith("error: ")
        assert reason in last


def test_trackers_get_the_numbers(tmp_path: Path) -> None:
    words = ["sft", "--model", "model", "--data", "lessons.jsonl", "--out", str(tmp_path), *SMALL]
    assert call(*words, "--tracker", "tensorboard")[0] == 0
    found = dict(tracked.tensorboard(tmp_path / "tensorboard"))
    assert sorted(found) == [0, 1, 2]
    assert found[2]["loss"] == pytest.approx(points(tmp_path)[2]["loss"], rel=1e-6)
    code, _, complained = call(*words, "--tracker", "excel")
    assert (code, "no tracker 'excel'" in complained) == (1, True)


def test_numbers_go_to_telemetry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[tuple[float, dict[str, str]]] = []

    class Instrument:
        def set(self, value: float, labels: dict[str, str]) -> None:
            kept.append((value, labels))

    monkeypatch.setattr(training._value, "_real", Instrument())
    assert call("sft", "--model", "model", "--data", "lessons.jsonl", "--out", str(tmp_path), *SMALL)[0] == 0
    losses = [value for value, labels in kept if labels == {"algorithm": "sft", "name": "loss"}]
    assert losses == [point["loss"] for point in points(tmp_path) if "loss" in point]


def test_a_finished_run_goes_on_only_when_asked(tmp_path: Path) -> None:
    words = ["sft", "--model", "model", "--data", "lessons.jsonl", "--out", str(tmp_path), "--batch", "4"]
    assert call(*words, "--steps", "1")[0] == 0
    code, _, complained = call(*words, "--steps", "2")
    assert code == 1
    assert "--resume" in complained
    assert call(*words, "--steps", "2", "--resume")[0] == 0
