"""The study of branches in a small form: it trains, keeps what it found, and does not do it twice."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.study_branch import COLUMNS, main, table


def test_the_table_has_a_row_a_seed_and_the_means() -> None:
    rows = [{"seed": seed} | dict.fromkeys(COLUMNS, 0.25 + seed / 2) for seed in (0, 1)]
    assert table(rows).splitlines()[2:] == [
        "| 0 |" + " 0.250 |" * len(COLUMNS),
        "| 1 |" + " 0.750 |" * len(COLUMNS),
        "| mean |" + " 0.500 |" * len(COLUMNS),
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_is_kept_and_a_claim_that_fails_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "runs.jsonl"
    monkeypatch.setattr(sys, "argv", ["study", "--seeds", "0", "--versions", "4", "--groups", "16", "--out", str(out)])
    main()
    (line,) = out.read_text().splitlines()
    row = json.loads(line)
    assert len(row["rewards"]) == 4
    assert len(row["reach"]) == 2
    assert all(0 <= row[name] <= 1 for name in COLUMNS)
    out.write_text(json.dumps(row | {"sft": row["start"]}) + "\n")
    assert main() == 1
    assert "NO: seeds [0]" in capsys.readouterr().out
