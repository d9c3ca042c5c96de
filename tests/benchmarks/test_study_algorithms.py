"""The study of algorithms in a small form: it learns, keeps what it found, and does not do it twice."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.study_algorithms import main


@pytest.mark.slow
def test_a_run_is_kept_and_a_short_gain_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "runs.jsonl"
    flags = ["rloo", "sft", "--seeds", "0", "--steps", "2", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["study", *flags, "--bar", "-1"])
    assert main() == 0
    row, other = (json.loads(line) for line in out.read_text().splitlines())
    assert (row["algorithm"], row["seed"], len(row["curve"])) == ("rloo", 0, 2)
    assert (other["algorithm"], other["measure"], len(other["curve"])) == ("sft", "loss", 2)
    monkeypatch.setattr(sys, "argv", ["study", *flags, "--bar", "0.9", "--plot", str(tmp_path / "curves")])
    assert main() == 1
    assert "NO: rloo" in capsys.readouterr().out
    assert len(out.read_text().splitlines()) == 2
    assert {path.name for path in (tmp_path / "curves").iterdir()} == {"rloo.svg", "sft.svg"}
