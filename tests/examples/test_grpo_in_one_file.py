"""`examples/grpo_in_one_file.py` runs as a program, prints a line a version, and its curve rises."""

from __future__ import annotations

import runpy

import pytest

from tests.support.documents import ROOT

FILE = ROOT / "examples" / "grpo_in_one_file.py"


@pytest.mark.slow
def test_the_curve_rises(capsys: pytest.CaptureFixture[str]) -> None:
    train = runpy.run_path(str(FILE))["train"]
    curve = train(steps=12)
    assert len(capsys.readouterr().out.splitlines()) == 12
    assert sum(curve[-3:]) / 3 > sum(curve[:3]) / 3 + 0.2


def test_it_fits_on_one_screen_and_a_half() -> None:
    lines = FILE.read_text().splitlines()
    assert len(lines) < 110
    assert max(map(len, lines)) <= 120
