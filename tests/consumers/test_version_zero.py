from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.apps.demo import tiny
from millrace.consumers import policy_names, version_zero
from millrace.dialects.rendering.tokenizer import ChatTokenizer
from millrace.infra.engines.vllm import launch
from millrace.infra.errors import PolicyError
from millrace.infra.log.history import newest
from millrace.infra.log.memory.bus import MemoryBus
from millrace.trainers.errors import CheckpointError
from millrace.trainers.weights import checkpoint, manifest
from tests.support import chat_tokenizer
from tests.support.feed import settings_for, start_policy


def test_version_0_is_an_event_with_everything_that_starts_a_policy(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, "127.0.0.1:1", "t", **{"learner.seed": 7})[0]
    bus = MemoryBus()
    event = start_policy(settings, bus, tmp_path)
    names = policy_names.topics(settings)
    found = newest.head(bus, names["weights"], names["ledger"])
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
        version_zero.create(settings, tmp_path / "model", bus)


def test_what_is_no_model_creates_nothing(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, "127.0.0.1:1", "t")[0]
    bus = MemoryBus()
    bus.ensure_topics(settings.layout.specs())
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError):
        version_zero.create(settings, tmp_path / "empty", bus)
    names = policy_names.topics(settings)
    assert newest.head(bus, names["weights"], names["ledger"]) is None


def test_the_template_may_lie_in_the_tokenizer_settings(tmp_path: Path) -> None:
    assert version_zero.template_hash(tmp_path) == hashlib.sha256(b"").hexdigest()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ x }}"}))
    assert version_zero.template_hash(tmp_path) == hashlib.sha256(b"{{ x }}").hexdigest()


def test_every_template_of_a_model_is_in_version_0_and_under_its_hash(tmp_path: Path) -> None:
    """A version has plain files alone: templates in a folder of their own would be left behind, unseen by the hash."""
    plain, hashes = chat_tokenizer.TEMPLATE, set()
    for number, tools in enumerate(("# Tools", "# You may call", "# You must call")):
        settings = settings_for(tmp_path / str(number), "127.0.0.1:1", "t")[0]
        bus, model = MemoryBus(), tmp_path / str(number) / "model"
        bus.ensure_topics(settings.layout.specs())
        checkpoint.export(model, tiny.random_state(0))
        chat_tokenizer.write(model)
        if number:
            (model / "additional_chat_templates").mkdir()
            (model / "additional_chat_templates" / "tool_use.jinja").write_text(plain.replace("# Tools", tools))
        event = version_zero.create(settings, model, bus)
        mine, version = ChatTokenizer(model), ChatTokenizer(Path(event["uri"]))
        tool = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]
        for offered in (None, tool):
            user = [{"role": "user", "content": "hi"}]
            want = mine.render_text(user, offered, generate=True)
            assert version.render_text(user, offered, generate=True) == want
            assert (tools in want) is (offered is not None)
        assert event["template_hash"] == version.template_hash == mine.template_hash
        hashes.add(event["template_hash"])
    assert len(hashes) == 3


def test_an_object_store_needs_a_mount(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, "127.0.0.1:1", "t", objects="s3://bucket/x")[0]
    with pytest.raises(PolicyError, match="mount"):
        policy_names.weights_root(settings)


def test_tied_embeddings_are_refused_where_vllm_reloads_them_wrongly_and_untied_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "build_here", lambda _: "cpu")
    settings = settings_for(tmp_path, "127.0.0.1:1", "t")[0]
    settings = settings.model_copy(
        update={"engine": settings.engine.model_copy(update={"kind": "vllm", "local": True})}
    )
    state = tiny.random_state(0)
    config = json.loads(state.assets["config.json"]) | {"tie_word_embeddings": True}
    weights = {name: tensor for name, tensor in state.weights.items() if name != "lm_head.weight"}
    tied = replace(state, weights=weights, assets={**state.assets, "config.json": json.dumps(config).encode()})
    checkpoint.export(tmp_path / "tied", tied)
    bus = MemoryBus()
    bus.ensure_topics(settings.layout.specs())
    with pytest.raises(PolicyError, match=r"ties its embeddings.*--untie"):
        version_zero.create(settings, tmp_path / "tied", bus)
    made = version_zero.create(settings, tmp_path / "tied", bus, untie=True)
    assert "lm_head.weight" in checkpoint.read(Path(made["uri"])).weights
