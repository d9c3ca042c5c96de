from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from consumers import ledger, policy
from infra.bus.memory import MemoryBus
from infra.errors import PolicyError
from tests.support.feed import settings_for, start_policy
from trainers import checkpoint, manifest
from trainers.errors import CheckpointError


def test_version_0_is_an_event_with_everything_that_starts_a_policy(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, "127.0.0.1:1", "t", **{"learner.seed": 7})[0]
    bus = MemoryBus()
    event = start_policy(settings, bus, tmp_path)
    names = policy.topics(settings)
    found = ledger.head(bus, names["weights"], names["ledger"])
    assert found is not None
    assert found.weights == event
    assert (event["version"], event["parent"], event["mode"]) == (0, None, "full")
    assert (event["batch"], event["eta"], event["shards"], event["group_size"]) == (4, 2, 4, 2)
    assert (found.entry["seq_lo"], found.entry["seq_hi"], found.entry["groups"]) == (0, 0, [])
    where = Path(event["uri"])
    assert where.name == f"v0-{event['digest'][:12]}"
    assert manifest.verify(where, event["digest"]).files == event["files"]
    state = checkpoint.read(where)
    assert (state.step, state.seed, dict(state.moments)) == (0, 7, {})
    template = (where / "chat_template.jinja").read_bytes()
    assert event["template_hash"] == hashlib.sha256(template).hexdigest()


def test_a_policy_is_created_once(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, "127.0.0.1:1", "t")[0]
    bus = MemoryBus()
    start_policy(settings, bus, tmp_path)
    with pytest.raises(PolicyError, match="exists already, at version 0"):
        policy.create(settings, tmp_path / "model", bus)


def test_what_is_no_model_creates_nothing(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, "127.0.0.1:1", "t")[0]
    bus = MemoryBus()
    bus.ensure_topics(settings.layout.specs())
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError):
        policy.create(settings, tmp_path / "empty", bus)
    names = policy.topics(settings)
    assert ledger.head(bus, names["weights"], names["ledger"]) is None


def test_the_template_may_lie_in_the_tokenizer_settings(tmp_path: Path) -> None:
    assert policy.template_hash(tmp_path) == hashlib.sha256(b"").hexdigest()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ x }}"}))
    assert policy.template_hash(tmp_path) == hashlib.sha256(b"{{ x }}").hexdigest()


def test_an_object_store_needs_a_mount(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, "127.0.0.1:1", "t", objects="s3://bucket/x")[0]
    with pytest.raises(PolicyError, match="mount"):
        policy.weights_root(settings)
