"""Where a version's directory lies after its deployment was moved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millrace.infra.versions import directory, located

NAME = "v3-0123456789ab"


def event(uri: str, delta: str | None = None) -> Any:
    return {"policy": "p", "version": 3, "uri": uri, "delta": delta}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where a deployment was moved to."""
    (tmp_path / "new" / NAME).mkdir(parents=True)
    (tmp_path / "new" / "deltas").mkdir()
    (tmp_path / "new" / "deltas" / f"{NAME}.delta").touch()
    return tmp_path / "new"


def test_the_recorded_place_comes_first(root: Path, tmp_path: Path) -> None:
    old = tmp_path / "old" / NAME
    old.mkdir(parents=True)
    assert located(event(str(old)), root)["uri"] == str(old)
    assert directory(event(f"file://{old}"), f"file://{root}") == old


def test_what_is_not_there_is_found_by_its_name(root: Path) -> None:
    moved = located(event(f"/old/{NAME}", f"/old/deltas/{NAME}.delta"), root)
    assert moved["uri"] == str(root / NAME)
    assert moved["delta"] == str(root / "deltas" / f"{NAME}.delta")
    assert directory(event(f"file:///old/{NAME}"), f"file://{root}") == root / NAME


@pytest.mark.parametrize("uri", ["/old/v4-0123456789ab", "/old/..", "/old/deltas", "/old/", "s3://old/v3-0123456789ab"])
def test_what_lies_nowhere_keeps_its_recorded_place(root: Path, uri: str) -> None:
    """A name that no learner gives leads nowhere."""
    assert located(event(uri, "/old/deltas/x.delta"), root) == event(uri, "/old/deltas/x.delta")
