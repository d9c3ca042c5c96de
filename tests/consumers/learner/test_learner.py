"""The production learner, alone, over the bus in memory: what it commits for good, bad and missing groups."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from millrace.consumers import policy_names
from millrace.consumers.learner import build
from millrace.consumers.learner.step import leader
from millrace.infra import faults
from millrace.infra.config import Settings
from millrace.infra.errors import LedgerError, RefusedError, RegroupError, UnreachableError
from millrace.infra.log.topics import full_name
from millrace.schemas import codec
from millrace.schemas.arrays import pack, unpack
from millrace.trainers.backends.torch.backend import TorchBackend
from millrace.trainers.learning import Trainer
from millrace.trainers.weights import checkpoint, manifest
from tests.support.fault_points import fault_points
from tests.support.feed import feed
from tests.support.learners import Place, entries

Make = Callable[..., Any]


def digests(place: Any) -> list[str]:
    return [entry["digest"] for entry in entries(place.bus, place.settings)]


def test_versions_are_dense_chained_and_durable(place: Make) -> None:
    it = place()
    feed(it.bus, it.settings, range(16))
    it.learn(3)
    rows = entries(it.bus, it.settings)
    assert [row["version"] for row in rows] == [0, 1, 2, 3]
    assert [(row["seq_lo"], row["seq_hi"]) for row in rows] == [(0, 0), (0, 4), (4, 8), (8, 12)]
    assert [group["seq"] for row in rows for group in row["groups"]] == list(range(12))
    weights = [
        codec.decode_as("WeightVersion", r.value or b"")
        for r in it.bus.read(policy_names.topics(it.settings)["weights"], 0)
    ]
    for event in weights:
        path = policy_names.weights_root(it.settings) / event["uri"].rpartition("/")[2]
        assert manifest.verify(path, event["digest"]).files == event["files"]
    assert len(set(digests(it))) == 4
    last = rows[-1]
    assert last["layout"] == "torch:d1"
    assert [(s["samples"], s["groups"]) for s in last["ranks"]] == [(8, 4)]
    assert last["ranks"][0]["tokens"] == last["metrics"]["tokens_computed"] > 0
    assert last["metrics"]["reward_mean"] == 0.5
    assert last["metrics"]["staleness_tokens_0"] == last["metrics"]["tokens_trainable"]
    assert all(last[name] for name in ("config_hash", "code_hash", "cpu"))
    assert last["libraries"]["torch"]
    assert [entry["version"] for entry in it.entries] == [1, 2, 3]


def test_offsets_are_what_is_settled(place: Make) -> None:
    it = place()
    feed(it.bus, it.settings, range(6))
    it.learn(1)
    names = policy_names.topics(it.settings)
    group = it.bus.groups[policy_names.group(it.settings)]
    rows = [codec.decode_as("Resolution", r.value or b"") for r in it.bus.read(names["resolutions"], 0)]
    for partition in range(4):
        waiting = [p["offset"] for row in rows[4:] for p in row["trajectories"] if p["partition"] == partition]
        known = [p["offset"] + 1 for row in rows for p in row["trajectories"] if p["partition"] == partition]
        if known:
            assert group.offsets[partition] == min(waiting, default=max(known))


@pytest.mark.slow
def test_the_same_batches_give_the_same_bytes(place: Make) -> None:
    one, two = place(), place()
    for it in (one, two):
        feed(it.bus, it.settings, range(12))
    one.learn(3)
    for version in (1, 2, 3):  # a process a version
        two.learn(version)
    assert digests(one) == digests(two)


def test_a_group_that_is_gone_is_consumed_as_lost_by_name(place: Make) -> None:
    it = place()
    feed(it.bus, it.settings, range(4), gone={1})
    it.learn(1)
    (row,) = entries(it.bus, it.settings)[1:]
    assert [group["lost"] for group in row["groups"]] == [None, "gone from the log", None, None]
    assert row["ranks"][0]["groups"] == 3
    assert row["unchanged"] is None
    assert any("group-1" in text for text in it.warnings)


def test_when_nothing_can_be_read_the_next_version_has_the_same_bytes(place: Make) -> None:
    it = place()
    feed(it.bus, it.settings, range(4), gone=range(4))
    feed(it.bus, it.settings, range(4, 8))
    it.learn(2)
    first, second, third = entries(it.bus, it.settings)
    assert second["digest"] == first["digest"] != third["digest"]
    assert second["unchanged"] == "nothing trainable in the batch"
    assert all(group["lost"] for group in second["groups"])


def test_an_impossible_sample_loses_its_group_alone(place: Make) -> None:
    def broken(sample: dict[str, Any]) -> None:
        if sample["group"] == "group-2" and sample["sample"] == 1:
            sample["lineages"][0]["tokens"] = pack(np.full(len(unpack(sample["lineages"][0]["mask"])), 999, np.int32))

    it = place()
    feed(it.bus, it.settings, range(4), change=broken)
    it.learn(1)
    (row,) = entries(it.bus, it.settings)[1:]
    assert [bool(group["lost"]) for group in row["groups"]] == [False, False, True, False]
    assert "impossible" in row["groups"][2]["lost"]


def test_a_step_that_is_not_finite_changes_no_byte_and_says_so(place: Make) -> None:
    def absurd(sample: dict[str, Any]) -> None:
        mask = unpack(sample["lineages"][0]["mask"])
        sample["lineages"][0]["logprobs"] = pack(np.where(mask, -3e38, 0).astype(np.float32))

    it = place()
    feed(it.bus, it.settings, range(4), change=absurd)
    feed(it.bus, it.settings, range(4, 8))
    it.learn(2)
    first, second, third = entries(it.bus, it.settings)
    assert second["unchanged"] == "non-finite loss or gradient"
    assert second["digest"] == first["digest"] != third["digest"]
    assert all(math.isfinite(value) for value in third["metrics"].values())


@pytest.mark.parametrize(("release", "masked"), [("reserve", False), ("mask-head", True)])
def test_only_mask_head_masks_what_is_older_than_eta(place: Make, release: str, masked: bool) -> None:
    it = place(**{"policy.release": release, "policy.eta": 1})
    feed(it.bus, it.settings, range(16), version=0)
    it.learn(4)
    rows = entries(it.bus, it.settings)[1:]
    assert [row["masked_tokens"] > 0 for row in rows] == [False, False, masked, masked]
    assert [row["metrics"]["staleness_max"] for row in rows] == [0, 1, 2, 3]


def test_old_directories_go_and_needed_ones_stay(place: Make) -> None:
    it = place()
    feed(it.bus, it.settings, range(48))
    it.learn(12)
    kept = sorted(int(p.name[1:].partition("-")[0]) for p in policy_names.weights_root(it.settings).iterdir())
    assert kept[0] == 0
    assert kept[-3:] == [10, 11, 12]
    assert len(kept) <= 8
    assert checkpoint.read(next(policy_names.weights_root(it.settings).glob("v12-*"))).step == 12


def test_a_version_that_others_collect_while_a_learner_starts_is_not_missed(
    place: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = place()
    feed(it.bus, it.settings, range(36))
    it.learn(1)
    build_trainer = build.build_trainer

    def slow(settings: Settings) -> Trainer:
        monkeypatch.undo()
        it.learn(8)
        assert not list(policy_names.weights_root(settings).glob("v1-*"))
        return build_trainer(settings)

    monkeypatch.setattr(build, "build_trainer", slow)
    it.learn(9)
    assert [entry["version"] for entry in it.entries] == list(range(1, 10))


def test_a_learner_that_stops_before_it_has_read_its_version_goes_on_from_the_newest(place: Make) -> None:
    """The others expel it, train on, and collect the version that it was about to read."""
    it = place()
    feed(it.bus, it.settings, range(36))
    it.learn(1)
    stopped = False

    def stop(state: str) -> None:
        nonlocal stopped
        if state != "formed" or stopped:
            return
        stopped = True
        group = policy_names.group(it.settings)
        (member,) = it.bus.group(group).members
        it.bus.expel(group, member.member_id)
        it.learn(8)

    it.learn(9, on_phase=stop)
    assert any("version 1 was collected" in text for text in it.warnings)
    assert [entry["version"] for entry in it.entries] == list(range(1, 10))


def points() -> list[str]:
    ours = ("learner.", "checkpoint.")
    return [name for name in fault_points("consumers") if name.startswith(ours) and not name.endswith("_collect")]


class Killed(BaseException):
    """Stands in for SIGKILL."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Digests of the three versions that an undisturbed learner makes of twelve groups, and of version 0."""
    undisturbed = Place(tmp_path_factory.mktemp("whole"))
    feed(undisturbed.bus, undisturbed.settings, range(12))
    undisturbed.learn(3)
    made = digests(undisturbed)
    undisturbed.bus.close()
    assert len(made) == 4
    return made


@pytest.mark.slow
@pytest.mark.parametrize("name", points())
def test_a_crash_anywhere_leaves_the_same_chain(place: Make, whole: list[str], name: str) -> None:
    cut = place()
    feed(cut.bus, cut.settings, range(12))
    left = 1 if name == "learner.after_fence" else 2

    def hook(point: str) -> None:
        nonlocal left
        if point == name:
            left -= 1
            if left == 0:
                raise Killed

    before = faults.install(hook)
    try:
        with pytest.raises(Killed):
            cut.learn(3)
    finally:
        faults.install(before)
    cut.learn(3)
    assert digests(cut) == whole
    rows = entries(cut.bus, cut.settings)
    assert [(row["version"], row["seq_lo"], row["seq_hi"]) for row in rows] == [
        (0, 0, 0),
        (1, 0, 4),
        (2, 4, 8),
        (3, 8, 12),
    ]


@pytest.mark.parametrize(("point", "committed"), [("learner.before_commit", False), ("learner.after_commit", True)])
@pytest.mark.slow
def test_an_unknown_outcome_is_read_from_the_log(place: Make, whole: list[str], point: str, committed: bool) -> None:
    unsure = place()
    feed(unsure.bus, unsure.settings, range(12))
    left = 1

    def silent(name: str) -> None:
        nonlocal left
        if name == point and left:
            left -= 1
            raise UnreachableError("the broker did not answer")

    before = faults.install(silent)
    try:
        unsure.learn(3)
    finally:
        faults.install(before)
    assert left == 0
    assert digests(unsure) == whole
    assert any("was not committed" in text for text in unsure.warnings) is not committed


def test_a_ledger_without_its_weights_is_refused(place: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.infra.log.history.newest.MARKERS_S", 0.1)
    it = place()
    topic = full_name("t", "pico.ledger")
    head = next(iter(it.bus.read(topic, 0)))
    entry = codec.decode_as("LedgerEntry", head.value or b"")
    from millrace.infra.log.base import Outgoing
    from millrace.infra.log.history.ledger import chain_entry

    with it.bus.publisher() as publisher:
        forged = chain_entry({**entry, "version": 1}, entry["hash"])  # type: ignore[typeddict-item]
        publisher.publish(Outgoing(topic, b"1", codec.encode("LedgerEntry", forged))).result()
    with pytest.raises(LedgerError):
        it.learn(2)


def test_a_step_without_memory_is_done_again_from_the_same_batch(place: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step of a version runs out of memory once: the version is trained again from its parent,
    with rows of half the budget, and the record has the budget that trained."""
    it, plain = (place(**{"learner.tokens_per_pack": tokens}) for tokens in (64, 32))
    for one in (it, plain):
        feed(one.bus, one.settings, range(8))
    plain.learn(2)
    step, steps = TorchBackend.step, iter(range(100))

    def fail_once(self: TorchBackend, *arguments: Any, **keywords: Any) -> Any:
        if next(steps) == 1:  # the warm-up has taken one
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return step(self, *arguments, **keywords)

    monkeypatch.setattr(TorchBackend, "step", fail_once)
    it.learn(2)
    assert any("rows of 64 tokens ran out of memory" in text for text in it.warnings)
    kernels = [row["kernels"] for row in entries(it.bus, it.settings)]
    assert [(row.get("tokens_per_pack"), row.get("attention")) for row in kernels] == [
        (None, None),
        *[("32", "runs")] * 2,
    ]
    assert digests(it) == digests(plain)


def test_the_next_step_trains_while_a_version_is_on_its_way(place: Make, whole: list[str]) -> None:
    """Version 1 begins its transaction only once the step of version 2 is over."""
    it = place()
    feed(it.bus, it.settings, range(12))
    second_step, began, steps = threading.Event(), [], []

    def hook(point: str) -> None:
        if point == "learner.after_step":
            steps.append(len(entries(it.bus, it.settings)))
            if len(steps) == 2:
                second_step.set()
        elif point == "learner.before_begin":
            began.append(threading.current_thread().name)
            assert second_step.wait(60), "no step was trained beside the publication"

    before = faults.install(hook)
    try:
        it.learn(3)
    finally:
        faults.install(before)
    assert steps[:2] == [1, 1], "versions in the ledger at the end of the first two steps"
    assert all(name.startswith("publish") for name in began)
    assert digests(it) == whole
    metrics = entries(it.bus, it.settings)[2]["metrics"]
    phases = [
        value
        for name, value in metrics.items()
        if name.startswith("timings_") and not name.startswith(("timings_total", "timings_step", "timings_beside_"))
    ]
    assert metrics["timings_total"] == pytest.approx(sum(phases))
    assert metrics["timings_beside_checkpoint"] > 0


def test_a_step_that_was_trained_on_no_version_goes_with_its_generation(place: Make, whole: list[str]) -> None:
    """Version 1 is refused after the step of version 2 has trained on it: both are trained again."""
    it = place()
    feed(it.bus, it.settings, range(12))
    second_step, steps, refusals = threading.Event(), [], []

    def hook(point: str) -> None:
        if point == "learner.after_step":
            steps.append(point)
            if len(steps) == 2:
                second_step.set()
        elif point == "learner.before_commit" and not refusals:
            assert second_step.wait(60)
            refusals.append(point)
            raise RefusedError("the group moved on")

    before = faults.install(hook)
    try:
        it.learn(3)
    finally:
        faults.install(before)
    assert digests(it) == whole
    assert [row["version"] for row in entries(it.bus, it.settings)] == [0, 1, 2, 3]
    assert any("the commit of version 1 was refused" in text for text in it.warnings)
    assert len(steps) == 5, "two that were for nothing, three that are versions"


def test_a_log_that_is_silent_while_a_generation_ends_ends_no_process(
    place: Make, whole: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer dies beside a version on its way, which is committed; who serves what is not to be had then."""
    it = place(**{"learner.keep": 1})
    feed(it.bus, it.settings, range(12))
    for number in range(8):
        (Path(it.settings.weights) / f"beside-{number}").mkdir()
    second_step, steps, looks = threading.Event(), [], []

    def hook(point: str) -> None:
        if point == "learner.after_step":
            steps.append(point)
            if len(steps) == 2:
                second_step.set()
                raise RegroupError("a peer died")
        elif point == "learner.before_begin":
            assert second_step.wait(60)

    def serving(*arguments: Any) -> set[int]:
        looks.append(arguments)
        if len(looks) == 1:
            raise UnreachableError("the broker did not answer")
        return set()

    monkeypatch.setattr(leader, "serving_versions", serving)
    before = faults.install(hook)
    try:
        it.learn(3)
    finally:
        faults.install(before)
    assert digests(it) == whole
    assert len(steps) == 4, "only what was trained on no version is trained again"
    assert len(looks) > 1, "the next one collects"
