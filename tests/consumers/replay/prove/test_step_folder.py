"""A step in a folder is the step, bit for bit."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.consumers.replay.prove import step_folder
from millrace.consumers.replay.prove.step_folder import Material
from millrace.infra.errors import ProofError
from millrace.trainers.batches.sample import Sample

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    length = draw(st.integers(1, 6))
    mask = np.array([0, *draw(st.lists(st.integers(0, 1), min_size=length - 1, max_size=length - 1))], np.uint8)
    numbers = st.lists(st.integers(-1, 2**31 - 1), min_size=length, max_size=length)
    return Sample(
        tokens=np.array(draw(numbers), np.int32),
        mask=mask,
        logprobs=np.array(draw(st.lists(FLOATS, min_size=length, max_size=length)), np.float32),
        versions=np.array(draw(numbers), np.int32),
        reward=draw(st.none() | st.floats(allow_nan=False, allow_infinity=False)),
        seq=draw(st.integers(0, 3)),
        group=draw(st.text(max_size=5)),
        trajectory=draw(st.text(max_size=5)),
        lineage=draw(st.integers(0, 3)),
        truncated=draw(st.booleans()),
    )


@settings(max_examples=60)
@given(st.lists(samples(), max_size=5), st.none() | st.integers(-3, 9))
def test_what_is_read_is_what_was_written(given_: list[Sample], oldest: int | None) -> None:
    cells = {seq: seq % 2 for seq in range(4)}
    it = Material(7, [[0, 2], [1, 3]], cells, oldest, {3: "gone from the log"}, given_)
    with tempfile.TemporaryDirectory() as name:
        it.write(Path(name))
        back = step_folder.read(Path(name))
    assert (back.parent, back.minibatches, back.cells, back.oldest, back.losses) == (
        it.parent,
        it.minibatches,
        it.cells,
        it.oldest,
        it.losses,
    )
    assert len(back.samples) == len(given_)
    for mine, theirs in zip(given_, back.samples, strict=True):
        for name in ("tokens", "mask", "logprobs", "versions"):
            one, two = getattr(mine, name), getattr(theirs, name)
            assert one.dtype == two.dtype
            assert one.tobytes() == two.tobytes()
        for name in ("reward", "seq", "group", "trajectory", "lineage", "truncated"):
            assert getattr(mine, name) == getattr(theirs, name)


def test_a_folder_that_is_no_step_is_refused_by_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ProofError, match="no dumped step"):
        step_folder.read(tmp_path)
    Material(0, [[0]], {0: 0}, None, {}, []).write(tmp_path)
    whole = json.loads((tmp_path / step_folder.STEP).read_text())
    for name in ("parent", "minibatches", "cells", "samples", "oldest"):
        (tmp_path / step_folder.STEP).write_text(json.dumps({k: v for k, v in whole.items() if k != name}))
        with pytest.raises(ProofError, match=name):
            step_folder.read(tmp_path)
    (tmp_path / step_folder.STEP).write_text(json.dumps(whole))
    (tmp_path / step_folder.SAMPLES).write_bytes(b"x")
    with pytest.raises(ProofError, match="no whole step"):
        step_folder.read(tmp_path)
