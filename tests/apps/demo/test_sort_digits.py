from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

from millrace.apps.demo import sort_digits


@pytest.mark.parametrize(
    ("digits", "reply", "reward"),
    [
        ("352041", "012345", 1.0),
        ("352041", "012354", 0.0),
        ("352041", "01234", 0.0),
        ("352041", "0123455", 0.0),
        ("352041", " 012345", 0.0),
        ("352041", "", 0.0),
        ("110022", "001122", 1.0),
    ],
)
def test_verify(digits: str, reply: str, reward: float) -> None:
    assert sort_digits.verify(digits, reply) == reward


def test_training_and_evaluation_never_meet() -> None:
    train = set(islice(sort_digits.prompts(0), 3000))
    evaluation = set(islice(sort_digits.prompts(1, evaluation=True), 1000))
    assert not train & evaluation
    share = sum(sort_digits.held_out(f"{n:06d}") for n in range(0, 10**6, 37)) / len(range(0, 10**6, 37))
    assert share == pytest.approx(0.1, abs=0.01)


def test_written_tasks_repeat_with_their_seed(tmp_path: Path) -> None:
    for name in ("a", "b"):
        sort_digits.write_tasks(tmp_path / name, 50, seed=3)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    rows = [json.loads(line) for line in (tmp_path / "a").read_text().splitlines()]
    assert len({row["id"] for row in rows}) == 50
    for row in rows:
        (message,) = row["messages"]
        assert message["role"] == "user"
        assert not sort_digits.held_out(message["content"])
        assert sort_digits.verify(message["content"], row["answer"]) == 1.0
