"""A learner whose engines read deltas: the versions are the same, and each can be composed from its anchor."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import cast

import httpx
import pytest
import torch

from millrace.consumers import policy_names
from millrace.consumers.reloader.compose import compose
from millrace.infra import faults
from millrace.schemas import codec
from millrace.schemas.records import WeightVersion
from millrace.trainers.weights import broadcast, checkpoint, manifest
from tests.support.feed import feed
from tests.support.learners import Place, entries

Make = Callable[..., Place]


def events(it: Place) -> dict[int, WeightVersion]:
    topic = policy_names.topics(it.settings)["weights"]
    found = [codec.decode_as("WeightVersion", record.value or b"") for record in it.bus.read(topic, 0)]
    return {event["version"]: cast(WeightVersion, event) for event in found}


@pytest.mark.slow
def test_versions_between_anchors_are_sent_as_deltas_and_are_what_they_were(place: Make, tmp_path: Path) -> None:
    whole, sent = place(), place(**{"learner.anchor_every": 3, "learner.keep": 9})
    for it in (whole, sent):
        feed(it.bus, it.settings, range(24))
        it.learn(6)
    found = events(sent)
    assert [event["mode"] for event in found.values()] == ["full", "delta", "delta", "full", "delta", "delta", "full"]
    assert [event["digest"] for event in found.values()] == [event["digest"] for event in events(whole).values()]
    for version in (1, 2, 4, 5):
        event = found[version]
        folder, _ = compose(event, found, tmp_path / f"cache-{version}", None)
        assert manifest.file_hash(folder / "model.safetensors") == event["files"]["model.safetensors"]
        delta = Path(event["delta"] or "")
        assert manifest.file_hash(delta) == event["delta_hash"]
        assert delta.stat().st_size == event["delta_bytes"]
    sizes = [(event["delta_bytes"], event["full_bytes"]) for event in found.values()]
    assert all(delta is None or (full or 0) > delta for delta, full in sizes)
    for row in entries(sent.bus, sent.settings)[1:]:
        delta, full = sizes[row["version"]]
        assert row["metrics"]["full_bytes"] == full
        assert row["metrics"]["sent_bytes"] == (delta or full)


def test_old_deltas_go_and_the_newest_chain_stays(place: Make, tmp_path: Path) -> None:
    it = place(**{"learner.anchor_every": 4, "learner.keep": 1})
    feed(it.bus, it.settings, range(44))
    it.learn(11)
    root = policy_names.weights_root(it.settings)
    numbers = sorted(int(path.name[1:].partition("-")[0]) for path in (root / "deltas").iterdir())
    assert numbers[-3:] == [9, 10, 11]
    assert numbers[0] > 1
    folder, _ = compose(events(it)[11], events(it), tmp_path / "cache", None)
    assert folder.name == next(root.glob("v11-*")).name


def test_a_parent_that_cannot_be_read_makes_a_whole_version(place: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from millrace.trainers.errors import CorruptCheckpoint
    from millrace.trainers.weights import delta_files

    def fail(*_: object, **__: object) -> None:
        raise CorruptCheckpoint("it is gone")

    monkeypatch.setattr(delta_files, "write", fail)
    it = place(**{"learner.anchor_every": 3})
    feed(it.bus, it.settings, range(4))
    it.learn(1)
    assert events(it)[1]["mode"] == "full"
    assert any("announced whole: it is gone" in text for text in it.warnings)


@pytest.mark.parametrize("name", ["delta.before_rename", "delta.after_rename"])
@pytest.mark.slow
def test_a_crash_around_a_delta_leaves_the_same_chain(place: Make, name: str) -> None:
    class Killed(BaseException):
        """Stands in for SIGKILL."""

    def hook(point: str) -> None:
        if point == name:
            faults.install(None)
            raise Killed

    flags = {"learner.anchor_every": 5}
    whole, cut = place(**flags), place(**flags)
    for it in (whole, cut):
        feed(it.bus, it.settings, range(8))
    whole.learn(2)
    before = faults.install(hook)
    try:
        with pytest.raises(Killed):
            cut.learn(2)
    finally:
        faults.install(before)
    cut.learn(2)
    hashes = [[(event["digest"], event["delta_hash"]) for event in events(it).values()] for it in (whole, cut)]
    assert hashes[0] == hashes[1]


def test_a_learner_sends_what_it_announces(place: Make) -> None:
    it = place(**{"engine.weights": "broadcast"})
    feed(it.bus, it.settings, range(8))
    it.learn(2)
    event = events(it)[2]
    answer = httpx.post(f"{event['broadcast']}/send", json={"version": 2, "digest": event["digest"], "ranks": 1}).json()
    header, digest = base64.b64decode(answer["header"]), event["files"]["model.safetensors"]
    found = broadcast.receive(answer["host"], answer["port"], 1, 1, header, digest, timeout_s=60)
    wanted = checkpoint.read(Path(event["uri"])).weights
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert events(it)[0]["broadcast"] is None
