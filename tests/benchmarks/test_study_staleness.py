"""The study of staleness in a small form: it is kept, resumed, tabled and drawn."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.study_staleness import interval, main, plot, table


def row(correction: str, eta: int, seed: int, accuracy: float) -> dict[str, object]:
    return {"correction": correction, "eta": eta, "seed": seed, "accuracy": accuracy}


def test_an_interval_is_students() -> None:
    mean, half = interval([0.1, 0.2, 0.3, 0.4, 0.5])
    assert (mean, half) == (pytest.approx(0.3), pytest.approx(2.776 * 0.158114 / 5**0.5, rel=1e-4))
    assert interval([0.7]) == (0.7, 0.0)


def test_the_table_has_a_row_a_correction_and_a_column_an_eta(tmp_path: Path) -> None:
    rows = [row("coupled", 4, 0, 0.5), row("coupled", 4, 1, 0.5), row("naive", 0, 0, 0.25)]
    assert table(rows).splitlines()[2:] == ["| naive | 0.250 ± 0.000 |  |", "| coupled |  | 0.500 ± 0.000 |"]
    plot(rows, tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").read_text().count("naive") == 1


@pytest.mark.slow
def test_it_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "runs.jsonl"
    flags = ["--corrections", "naive", "--etas", "0", "2", "--steps", "3", "--groups", "4", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["study", *flags, "--seeds", "0"])
    main()
    first = out.read_text()
    rows = [json.loads(line) for line in first.splitlines()]
    assert [(one["eta"], len(one["rewards"])) for one in rows] == [(0, 3), (2, 3)]
    assert rows[0]["rewards"][0] == rows[1]["rewards"][0]
    main()
    assert out.read_text() == first
    assert "| naive | 0." in capsys.readouterr().out
