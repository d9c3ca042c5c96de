"""Calls to token traces, exactly."""

from __future__ import annotations

import numpy as np
import pytest

from millrace.schemas import arrays
from millrace.streams.seal.assemble import assemble


def call(response, prompt, output, *, keep=0, lineage="l0", versions=None, logprobs=None, supersedes=None, why=None):
    n = len(output)
    return {
        "response": response,
        "lineage": lineage,
        "keep": keep,
        "prompt": arrays.pack(np.array(prompt, np.int32)),
        "output": arrays.pack(np.array(output, np.int32)),
        "logprobs": arrays.pack(np.array([-0.5] * n if logprobs is None else logprobs, np.float32)),
        "versions": arrays.pack(np.array([0] * n if versions is None else versions, np.int32)),
        "supersedes": supersedes,
        "why": why,
        "place": {"topic": "t", "partition": 0, "offset": 0},
    }


def tokens(lineage):
    return {name: arrays.unpack(lineage[name]).tolist() for name in ("tokens", "mask", "versions")}


def test_turns_of_one_lineage_are_joined():
    made = assemble([call("a", [1, 2], [3]), call("b", [4], [5, 6], keep=3, versions=[1, 2])])
    (lineage,) = made.lineages
    assert tokens(lineage) == {
        "tokens": [1, 2, 3, 4, 5, 6],
        "mask": [0, 0, 1, 0, 1, 1],
        "versions": [-1, -1, 0, -1, 1, 2],
    }
    assert arrays.unpack(lineage["logprobs"]).tolist() == [0, 0, -0.5, 0, -0.5, -0.5]
    assert lineage["calls"] == ["a", "b"]
    assert (made.v_head, made.v_tail, made.tokens, made.length, made.exclusions) == (0, 2, 3, 6, [])


def test_what_lies_beyond_the_kept_prefix_is_dropped():
    made = assemble([call("a", [1, 2], [3, 4]), call("b", [9], [5], keep=3)])
    assert tokens(made.lineages[0])["tokens"] == [1, 2, 3, 9, 5]
    assert made.exclusions == []
    made = assemble([call("a", [1, 2], [3, 4]), call("b", [9], [5], keep=2)])
    assert tokens(made.lineages[0]) == {"tokens": [1, 2, 9, 5], "mask": [0, 0, 0, 1], "versions": [-1, -1, -1, 0]}
    assert made.exclusions == ["a:cut"]


def test_a_superseded_reply_is_never_trained():
    made = assemble([call("a", [1], [2]), call("b", [1], [3], keep=0, supersedes="a")])
    assert tokens(made.lineages[0]) == {"tokens": [1, 3], "mask": [0, 1], "versions": [-1, 0]}
    assert made.exclusions == ["a:superseded"]
    other = assemble([call("a", [1], [2]), call("b", [1], [3], lineage="l1", supersedes="a")])
    assert [lineage["calls"] for lineage in other.lineages] == [["b"]]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"versions": [-1, -1]}, "unknown_version"),
        ({"logprobs": [np.nan, np.inf]}, "bad_logprobs"),
        ({"logprobs": [-1.0]}, "ragged"),
        ({"keep": 4}, "missing_prefix"),
        ({"keep": -1}, "missing_prefix"),
        ({"why": "text only"}, "text only"),
    ],
)
def test_what_cannot_train_is_named(fields, reason):
    made = assemble([call("a", [1], [2, 3], **fields)])
    assert (made.lineages, made.exclusions, made.v_head) == ([], [f"a:{reason}"], -1)


def test_only_tokens_of_a_known_version_train():
    made = assemble([call("a", [1], [2, 3, 4], versions=[5, -1, 6])])
    assert tokens(made.lineages[0])["mask"] == [0, 1, 0, 1]
    assert (made.v_head, made.v_tail) == (5, 6)


def test_context_of_an_untrainable_call_stays_context():
    made = assemble([call("a", [1], [2], why="aborted"), call("b", [3], [4], keep=2)])
    assert tokens(made.lineages[0])["mask"] == [0, 0, 0, 1]


def test_no_calls_no_lineages():
    assert assemble([]).lineages == []
