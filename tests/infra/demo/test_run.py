"""What the demo may remove: a former demo, nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.demo.run import _configure, empty
from infra.errors import ConfigError


def test_a_directory_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    (tmp_path / "millrace.toml").write_text("namespace = 'demo'\nhome = '.millrace'\n")
    with pytest.raises(ConfigError, match="no demo wrote"):
        empty(tmp_path)
    assert (tmp_path / "thesis.txt").exists()


def test_a_former_demo_is_removed(tmp_path: Path) -> None:
    home = tmp_path / "demo"
    empty(home)
    _configure(home, seed=0)
    (home / "logs").mkdir()
    empty(home)
    assert not list(home.iterdir())
