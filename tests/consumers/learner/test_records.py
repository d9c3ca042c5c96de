"""What a step leaves in the log about itself, and where its versions are found once their deployment was moved."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from millrace.consumers.audit import LawFinding, audit
from millrace.consumers.evaluation import find
from millrace.consumers.policy_names import topics, weights_root
from millrace.schemas import codec
from millrace.schemas.records import WeightVersion
from millrace.trainers.weights.manifest import base_digest
from tests.support.feed import feed
from tests.support.learners import Place, entries

Make = Callable[..., Place]


def law(it: Place, name: str, *, files: bool = False, root: str = "") -> LawFinding:
    """What the audit finds by one law. Others miss the turns of stages that never ran."""
    report = audit(it.bus, it.settings.namespace, it.settings.policy.name, files=files, root=root)
    return report.finding(name)


def events(it: Place) -> list[WeightVersion]:
    return [codec.decode_as("WeightVersion", r.value or b"") for r in it.bus.read(topics(it.settings)["weights"], 0)]


def test_an_entry_says_its_configuration_its_models_its_machine_and_who_computed_what(
    place: Make, tmp_path: Path
) -> None:
    reference = tmp_path / "place-0" / "model"
    it = place(**{"learner.knobs": json.dumps({"kl_coef": 0.1}), "learner.reference": str(reference)})
    feed(it.bus, it.settings, range(8))
    it.learn(2)
    zero, *trained = entries(it.bus, it.settings)
    assert (zero["config"], zero["models"], zero["device"], zero["threads"]) == ("", {}, "", 0)
    for entry in trained:
        assert hashlib.sha256(entry["config"].encode()).hexdigest() == entry["config_hash"]
        assert json.loads(entry["config"])["learner"]["knobs"] == {"kl_coef": 0.1}
        assert entry["models"] == {"reference": base_digest(reference)}
        assert (entry["device"], entry["threads"]) == ("cpu", torch.get_num_threads())
        assert {group["cell"] for group in entry["groups"]} == {0}
    for name in ("leaders", "figures", "weights", "versions", "ledger-chain"):
        assert law(it, name).holds, law(it, name).violations[:3]


def test_a_leader_whose_first_version_took_no_step_says_nothing_that_it_takes_back(place: Make) -> None:
    it = place()
    feed(it.bus, it.settings, range(4), gone=range(4))
    feed(it.bus, it.settings, range(4, 8))
    it.learn(2)
    _, idle, trained = entries(it.bus, it.settings)
    assert (idle["kernels"]["attention"], trained["kernels"]["attention"]) == ("", "runs")
    assert law(it, "leaders").holds, law(it, "leaders").violations[:3]


@pytest.mark.parametrize("anchor_every", [1, 2])
def test_a_moved_deployment_trains_on_and_its_audit_finds_every_version(
    place: Make, tmp_path: Path, anchor_every: int
) -> None:
    it = place(**{"learner.anchor_every": anchor_every})
    feed(it.bus, it.settings, range(16))
    it.learn(2)
    old = weights_root(it.settings)
    it.settings = it.settings.model_copy(update={"objects": str(tmp_path / "moved")})
    root = weights_root(it.settings)
    root.parent.mkdir(parents=True)
    old.rename(root)
    it.learn(4)
    assert [Path(event["uri"]).parent for event in events(it)] == [old, old, old, root, root]
    assert find(it.settings, it.bus, 2).path == root / Path(events(it)[2]["uri"]).name
    for name in ("weights", "files"):
        found = law(it, name, files=True, root=it.settings.weights)
        assert found.holds, found.violations[:3]
    assert law(it, "files", files=True, root=it.settings.weights).facts["directories"] == 5
    assert not law(it, "weights").holds, "nobody said that it was moved"


def test_every_nth_version_stays_for_good(place: Make) -> None:
    it = place(**{"learner.keep": 1, "learner.keep_every": 3})
    feed(it.bus, it.settings, range(40))
    it.learn(10)
    left = {int(path.name[1:].partition("-")[0]) for path in weights_root(it.settings).glob("v*-*")}
    assert {0, 3, 6, 9, 10} <= left
    assert len(left) < 10
