"""The example in `trainers`' docstring runs."""

from __future__ import annotations

import textwrap
from pathlib import Path

from millrace import trainers
from millrace.apps.demo import tiny
from millrace.trainers.weights import checkpoint


def test_the_example_runs(tmp_path: Path) -> None:
    checkpoint.export(tmp_path / "model", tiny.random_state(0))
    example = textwrap.dedent((trainers.__doc__ or "").split(":\n\n", 1)[1])
    names: dict[str, object] = {"model_dir": tmp_path / "model", "weights_dir": tmp_path / "weights"}
    exec(example, names)
    trained = checkpoint.read(names["path"])  # type: ignore[arg-type]
    assert trained.step == 1
    assert len(example.splitlines()) <= 36
