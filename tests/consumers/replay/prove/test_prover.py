"""Versions that a production learner trained over the bus in memory, trained again by real processes: equal bytes, or
the difference by its name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from millrace.apps.demo import tiny
from millrace.consumers import policy_names
from millrace.consumers.learner.group import identity
from millrace.consumers.replay.prove.command import ReplayOptions, load, proving
from millrace.consumers.replay.prove.plan import Plan
from millrace.consumers.replay.prove.prover import Outcome
from millrace.infra.errors import ConfigError, ProofError
from millrace.schemas import codec
from millrace.schemas.arrays import pack, unpack
from millrace.trainers.weights import checkpoint
from tests.support import forked
from tests.support.feed import feed
from tests.support.learners import Place, entries

pytestmark = [pytest.mark.slow]

Make = Callable[..., Place]


def prove(it: Place, versions: str = "all", settings: Any = None, **options: Any) -> tuple[Plan, list[Outcome]]:
    chosen = ReplayOptions(versions, **options)
    with proving(settings or it.settings, it.bus, chosen, forked.server()) as (plan, outcomes):
        return plan, list(outcomes)


def words(outcomes: list[Outcome]) -> list[tuple[int, str]]:
    return [(outcome.version, outcome.word) for outcome in outcomes]


def root(it: Place) -> Path:
    return policy_names.weights_root(it.settings)


def everything(it: Place) -> Any:
    """All that lies on the bus, and in the directory of versions."""
    topics = {name: [list(it.bus.read(name, p)) for p in range(it.bus.partitions(name))] for name in it.bus.topics("")}
    files = {path: path.stat().st_mtime_ns for path in sorted(root(it).rglob("*"))}
    return topics, files, dict(it.bus.groups[policy_names.group(it.settings)].offsets)


def with_learner(it: Place, **changes: Any) -> Any:
    return it.settings.model_copy(update={"learner": it.settings.learner.model_copy(update=changes)})


def test_every_version_is_proven_and_nothing_is_touched(place: Make) -> None:
    """Lost groups, a batch of which nothing was left, a process a version, and files of the newest versions alone."""
    it = place(**{"learner.keep": 2, "learner.minibatches": 2})
    feed(it.bus, it.settings, range(8), gone={1})
    it.learn(1)
    it.learn(2)
    feed(it.bus, it.settings, range(8, 12), gone=range(8, 12))
    feed(it.bus, it.settings, range(12, 40))
    it.learn(10)
    kept = {path.name.partition("-")[0] for path in root(it).iterdir()}
    assert "v5" not in kept
    before = everything(it)
    plan, outcomes = prove(it)
    assert everything(it) == before
    assert plan.start == 0
    assert words(outcomes) == [(version, "equal") for version in range(1, 11)]
    assert [one.digest for one in outcomes] == [row["digest"] for row in entries(it.bus, it.settings)[1:]]
    assert (outcomes[0].lost, outcomes[2].lost) == (1, 4)
    assert outcomes[2].unchanged == "nothing trainable in the batch"
    plan, outcomes = prove(it, "3")
    assert (plan.start, list(plan.on_the_way)) == (0, [1, 2])
    assert [(one.version, one.asked) for one in outcomes] == [(1, False), (2, False), (3, True)]


def test_a_moved_deployment_is_proven(place: Make, tmp_path: Path) -> None:
    """The log names its versions where they lay then."""
    it = place(**{"learner.keep": 1})
    feed(it.bus, it.settings, range(12))
    it.learn(3)
    old = root(it)
    it.settings = it.settings.model_copy(update={"objects": str(tmp_path / "moved")})
    root(it).parent.mkdir(parents=True)
    old.rename(root(it))
    plan, outcomes = prove(it)
    assert (plan.start, words(outcomes)) == (0, [(version, "equal") for version in (1, 2, 3)])


def alter(it: Place, seq: int, change: Callable[[dict[str, Any]], None]) -> None:
    """The first trajectory of a group becomes another one, where it lies."""
    topic = policy_names.topics(it.settings)["trajectories"]
    for log in it.bus.of(topic):
        for offset, record in enumerate(log.entries):
            if record is not None and record.key == f"group-{seq}".encode():
                sample: Any = codec.decode_as("Trajectory", record.value or b"")
                change(sample)
                log.entries[offset] = replace(record, value=codec.encode("Trajectory", sample))
                return
    raise AssertionError(f"no group {seq}")


def other_token(sample: dict[str, Any]) -> None:
    tokens = unpack(sample["lineages"][0]["tokens"]).copy()
    tokens[-1] ^= 1
    sample["lineages"][0]["tokens"] = pack(tokens)


def test_a_changed_token_is_found_by_the_version_that_it_trained(place: Make) -> None:
    it = place(**{"learner.keep": 1})
    feed(it.bus, it.settings, range(32))
    it.learn(8)
    alter(it, 9, other_token)  # of version 3, whose files are gone
    alter(it, 29, other_token)  # of version 8, whose files are there
    _, outcomes = prove(it)
    assert words(outcomes) == [(1, "equal"), (2, "equal"), (3, "differs")]
    assert "model.safetensors differs" in outcomes[-1].detail
    alter(it, 9, other_token)
    _, outcomes = prove(it)
    assert words(outcomes)[-2:] == [(7, "equal"), (8, "differs")]
    assert "model.safetensors: tensor" in outcomes[-1].detail
    assert outcomes[-1].relative is not None
    assert outcomes[-1].relative > 0


def test_what_differs_is_refused_by_name_before_anything_trains(
    place: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    it = place()
    feed(it.bus, it.settings, range(8))
    it.learn(2)

    def refused(**changes: Any) -> str:
        with pytest.raises(ProofError) as error:
            prove(it, settings=with_learner(it, **changes))
        return str(error.value)

    assert "Versions 1..2: [learner] threads is 2, was 1" in refused(threads=2)
    assert "[learner] lr is 0.001, was 0.0005" in refused(lr=1e-3)
    assert "[learner] lora.rank is 4, was 0" in refused(lora=it.settings.learner.lora.model_copy(update={"rank": 4}))
    assert "the reference has other content (" in refused(reference=str(next(root(it).glob("v1-*"))), algorithm="grpo")
    with monkeypatch.context() as patched:
        patched.setattr(identity, "code_hash", lambda: "0" * 64)
        assert "the code is 000000000000, was " in refused()
    with monkeypatch.context() as patched:
        patched.setattr(identity, "cpu_hash", lambda: "another")
        assert "the CPU is of another kind" in refused()
    with monkeypatch.context() as patched:
        patched.setattr(identity, "version", lambda name: "0.1" if name == "torch" else metadata.version(name))
        text = refused()
        assert "torch is 0.1, was " in text
        assert "numpy" not in text
    assert words(prove(it, settings=with_learner(it, lr=1e-3), from_ledger=True)[1]) == [(1, "equal"), (2, "equal")]


def test_a_reference_with_other_content_is_refused(place: Make, tmp_path: Path) -> None:
    model = tmp_path / "reference"
    checkpoint.export(model, tiny.random_state(3))
    it = place(**{"learner.reference": str(model), "learner.knobs": '{"kl_coef": 0.1}'})
    feed(it.bus, it.settings, range(4))
    it.learn(1)
    assert words(prove(it)[1]) == [(1, "equal")]
    moved = tmp_path / "moved"
    model.rename(moved)
    here = with_learner(it, reference=str(moved))
    assert words(prove(it, settings=here)[1]) == [(1, "equal")]
    checkpoint.export(moved, tiny.random_state(4))
    with pytest.raises(ProofError, match="the reference has other content"):
        prove(it, settings=here)


def test_anyway_compares_a_step_within_its_tolerance(place: Make) -> None:
    it = place(**{"learner.keep": 9})
    feed(it.bus, it.settings, range(12))
    it.learn(3)
    near = with_learner(it, tokens_per_pack=64)
    with pytest.raises(ProofError, match='tokens_per_pack is 64, was "auto"'):
        prove(it, settings=near)
    _, outcomes = prove(it, settings=near, anyway=True)
    assert {outcome.word for outcome in outcomes} <= {"equal", "close"}
    assert [outcome.version for outcome in outcomes] == [1, 2, 3]
    _, outcomes = prove(it, settings=with_learner(it, lr=0.1), anyway=True)
    assert words(outcomes) == [(1, "differs"), (2, "differs"), (3, "differs")]
    for version in (1, 2):
        shutil.rmtree(next(root(it).glob(f"v{version}-*")))
    _, outcomes = prove(it, settings=with_learner(it, lr=0.1), anyway=True)
    assert words(outcomes) == [(1, "unknown")]  # nobody can say how far, nor go on from there


def test_another_layout_is_compared_over_one_step(place: Make) -> None:
    it = place(**{"learner.keep": 1, "policy.batch": 4})
    feed(it.bus, it.settings, range(24))
    it.learn(6)
    _, outcomes = prove(it, "2..3", layout="torch:d2")
    told = [(one.version, one.layout, one.asked) for one in outcomes]
    assert told == [
        (1, "torch:d1", False),
        (2, "torch:d1", True),
        (2, "torch:d2", True),
        (3, "torch:d1", True),
        (3, "torch:d2", True),
    ]
    assert {one.word for one in outcomes if one.layout == "torch:d1"} == {"equal"}
    for one in (outcomes[2], outcomes[4]):
        assert one.word in ("close", "equal")
        assert one.relative is not None
        assert one.relative < 1e-5
    with pytest.raises(ConfigError, match="such as torch:d2"):
        prove(it, "2", layout="torch")


def test_what_retention_took_is_refused_with_what_is_left(place: Make) -> None:
    it = place(**{"learner.keep": 1})
    feed(it.bus, it.settings, range(24))
    it.learn(6)
    topic = policy_names.topics(it.settings)["trajectories"]
    lost = next(row for row in entries(it.bus, it.settings) if row["version"] == 2)["groups"][0]["trajectories"][0]
    it.bus.delete_before(topic, lost["partition"], lost["offset"] + 1)
    with pytest.raises(ProofError, match=r"samples of version [12] are gone from the log.*Version 6 can be proven"):
        prove(it, "4")
    for path in root(it).glob("v0-*"):
        shutil.rmtree(path)
    with pytest.raises(ProofError, match="no version before 4 has its files"):
        prove(it, "4")


def test_a_group_that_was_trained_and_cannot_be_read_any_more_is_named(place: Make) -> None:
    it = place()
    feed(it.bus, it.settings, range(8))
    it.learn(2)
    alter(it, 5, lambda sample: sample["lineages"][0].update(mask=pack(np.ones(2, np.uint8))))
    with pytest.raises(ProofError, match=r"version 2 was trained on what cannot be read any more: group group-5"):
        prove(it)


def test_a_dumped_step_trains_without_the_log_to_the_same_bits(place: Make, tmp_path: Path) -> None:
    it = place(**{"learner.minibatches": 2})
    feed(it.bus, it.settings, range(12), gone={6})
    it.learn(3)
    dumped = tmp_path / "dumped"
    shutil.rmtree(next(root(it).glob("v1-*")))
    assert words(prove(it, "2..3", dump=dumped)[1]) == [(1, "equal"), (2, "equal"), (3, "equal")]
    assert sorted(path.name for path in dumped.iterdir()) == ["v2", "v3"]
    packed = load_file(dumped / "v2" / "rank0.safetensors")
    assert set(packed) >= {f"{minibatch}/0/{name}" for minibatch in (0, 1) for name in ("tokens", "advantages", "keep")}
    said = json.loads((dumped / "v2" / "rank0.json").read_text())
    assert [len(step["micro_batches"][0]) for step in said] == [4, 2]
    result = json.loads((dumped / "v2" / "result.json").read_text())
    assert result["metrics"]["loss"] == entries(it.bus, it.settings)[2]["metrics"]["loss"]

    def again(folder: Path, **options: Any) -> Any:
        private = tmp_path / f"private-{len(list(tmp_path.iterdir()))}"
        private.mkdir()
        nowhere = it.settings.model_copy(update={"objects": str(tmp_path / "nowhere")})
        return load(folder, nowhere, private, context=forked.server(), **options)

    found = again(dumped / "v2")
    assert (found.equal, found.detail) == (True, "")
    assert found.step.metrics["loss"] == result["metrics"]["loss"]
    step = json.loads((dumped / "v2" / "step.json").read_text())
    step["samples"][0]["reward"] = 5.0
    (dumped / "v2" / "step.json").write_text(json.dumps(step))
    found = again(dumped / "v2")
    assert not found.equal
    assert found.detail == "model.safetensors differs"
    step["entry"]["cpu"] = "another"
    (dumped / "v2" / "step.json").write_text(json.dumps(step))
    with pytest.raises(ProofError, match="the CPU is of another kind"):
        again(dumped / "v2")
    with pytest.raises(ProofError, match="there already"):
        prove(it, "2", dump=dumped)
    with pytest.raises(ProofError, match="no dumped step"):
        again(dumped)


def test_adapters_and_critics_are_proven(place: Make) -> None:
    for flags in (
        {"learner.lora.rank": 4},
        {"learner.lora.rank": 4, "learner.lora.publish": "adapter", "engine.kind": "vllm"},
        {"learner.algorithm": "ppo"},
    ):
        it = place(**flags, **{"learner.keep": 1})
        feed(it.bus, it.settings, range(8))
        it.learn(2)
        assert words(prove(it)[1]) == [(1, "equal"), (2, "equal")], flags
