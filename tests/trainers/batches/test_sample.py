from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from millrace.schemas import arrays, codec
from millrace.trainers.batches.sample import Sample, check, samples_of
from millrace.trainers.errors import BadSample


def trajectory(**changes: Any) -> dict[str, Any]:
    lineage = {
        "id": "lineage",
        "tokens": arrays.pack(np.array([1, 5, 6, 2], np.int32)),
        "mask": arrays.pack(np.array([0, 0, 1, 1], np.uint8)),
        "logprobs": arrays.pack(np.array([0, 0, -0.5, -1.5], np.float32)),
        "versions": arrays.pack(np.array([-1, -1, 3, 4], np.int32)),
        "calls": ["response"],
    }
    record = {
        "id": "trajectory",
        "policy": "p",
        "tenant": "t",
        "group": "group",
        "ticket": 7,
        "sample": 0,
        "attempt": "attempt",
        "task_id": "task",
        "split": "train",
        "status": "completed",
        "reward": 1.0,
        "rewards": [],
        "missing": [],
        "lineages": [lineage, lineage],
        "excluded": [],
        "v_head": 3,
        "v_tail": 4,
        "tokens": 4,
        "length": 8,
        "events": [],
        "sealed_at": 0,
    }
    lineage.update({name: changes.pop(name) for name in list(changes) if name in lineage})
    return {**record, **changes}


def test_a_record_off_the_wire_becomes_one_sample_a_lineage() -> None:
    record = codec.decode_as("Trajectory", codec.encode("Trajectory", trajectory()))
    first, second = samples_of(record, seq=12)
    assert (first.lineage, second.lineage) == (0, 1)
    assert (first.seq, first.group, first.trajectory, first.reward) == (12, "group", "trajectory", 1.0)
    assert first.tokens.tolist() == [1, 5, 6, 2]
    assert first.mask.tolist() == [0, 0, 1, 1]
    assert first.logprobs.tolist() == [0, 0, -0.5, -1.5]
    assert first.versions.tolist() == [-1, -1, 3, 4]
    assert (first.length, first.trainable) == (4, 2)


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_none(reward: float | None) -> None:
    assert samples_of(trajectory(reward=reward), 0)[0].reward is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": arrays.pack(np.arange(3, dtype=np.int32))}, "different lengths"),
        ({"mask": arrays.pack(np.array([1, 0, 1, 1], np.uint8))}, "nothing predicts it"),
        ({"logprobs": arrays.pack(np.array([0, 0, np.nan, 0], np.float32))}, "no finite behaviour log-probability"),
        ({"logprobs": arrays.pack(np.array([0, 0, -np.inf, 0], np.float32))}, "no finite behaviour log-probability"),
        ({"tokens": {"dtype": "int32", "data": b"123"}}, "are no array"),
        ({"tokens": {"dtype": "text", "data": b"1234"}}, "are no array"),
        ({name: arrays.empty_array("int32") for name in ("tokens", "mask", "logprobs", "versions")}, "no tokens"),
    ],
)
def test_impossible_records_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadSample, match=message) as caught:
        samples_of(trajectory(**changes), 0)
    assert "trajectory" in str(caught.value)


@pytest.mark.parametrize(
    ("vocabulary", "longest", "message"), [(6, 10, "outside 0..5"), (10, 3, "4 tokens, the model takes 3")]
)
def test_samples_that_do_not_fit_the_model_are_refused(vocabulary: int, longest: int, message: str) -> None:
    with pytest.raises(BadSample, match=message):
        check(samples_of(trajectory(), 0), vocabulary=vocabulary, longest=longest)


def test_negative_tokens_are_refused() -> None:
    tokens = np.array([1, -5], np.int32)
    sample = Sample(tokens, np.array([0, 1], np.uint8), np.zeros(2, np.float32), tokens, None, 0, "g", "t")
    with pytest.raises(BadSample, match="token id"):
        check([sample], vocabulary=10, longest=10)
