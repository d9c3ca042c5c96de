from __future__ import annotations

import hashlib
import json
import shutil
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.consumers.learner.group import identity
from millrace.consumers.learner.group.agreement import client_id
from millrace.consumers.learner.group.identity import identify, libraries, library_hash, tag_differences, tag_of
from millrace.infra.config import load
from millrace.infra.errors import ConfigError
from millrace.infra.process import cuda
from millrace.trainers.weights.manifest import base_digest


def test_only_what_changes_training_changes_the_identity() -> None:
    plain = identify(load())
    assert identify(load(flags={"learner.keep": 9, "learner.host": "10.0.0.1", "learner.max_versions": 3})) == plain
    assert identify(load(flags={"learner.keep_every": 5})) == plain
    assert identify(load(flags={"learner.lr": 1e-3})).config != plain.config
    assert identify(load(flags={"learner.backend": "torch:t2"})).config != plain.config
    assert identify(load(flags={"policy.release": "soft"})).config != plain.config


def test_a_member_shows_it_in_its_client_id() -> None:
    shown = identify(load()).tag
    assert tag_of(client_id(f"learner/{shown}", "127.0.0.1", 5)) == shown


def test_the_one_that_differs_is_named_with_what_it_differs_in() -> None:
    assert tag_differences(["a-b-c", "a-b-c"], "") == {}
    assert tag_differences(["a-b-c", "x-b-c"], "") == {1: "configuration"}
    assert tag_differences(["a-b-c", "a-x-y"], "") == {1: "code and libraries"}
    assert tag_differences([], "a-b-c") == {}


def test_the_ledger_decides_who_is_right_where_somebody_has_its_identity() -> None:
    assert tag_differences(["x-b-c", "a-b-c"], "a-b-c") == {0: "configuration"}
    assert tag_differences(["x-b-c", "x-b-c"], "a-b-c") == {}


APART = ("torch[actor]:d4+torch[critic]:d1", "torch[critic]:d1+torch[actor]:d2")


def test_how_many_share_a_batch_is_no_difference() -> None:
    for one, two in (("torch", "fsdp:d4"), ("torch:t2", "torch:d3t2"), ("torch:d2e2", "torch:d4e2"), APART):
        assert identify(load(flags={"learner.backend": one})) == identify(load(flags={"learner.backend": two}))


def test_each_backend_names_the_libraries_that_it_trains_with() -> None:
    plain = identify(load()).libraries
    assert {"python", "torch", "numpy"} <= plain.keys()
    assert identify(load(flags={"learner.backend": "fsdp:d2"})).libraries == plain
    for backend, added in (("deepspeed", "deepspeed"), ("megatron", "megatron-core")):
        assert identify(load(flags={"learner.backend": backend})).libraries.keys() - plain.keys() == {added}


def test_on_a_gpu_they_are_joined_by_its_kernels_and_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines of one group may have other drivers, but no other CUDA."""
    plain = libraries(["torch"], gpu=False)
    monkeypatch.setattr(cuda, "driver", lambda: "535.1")
    there = libraries(["torch"], gpu=True)
    assert there.keys() - plain.keys() == {"triton", "cuda", "driver", "liger-kernel", "flash-attn"}
    assert there["driver"] == "535.1"
    assert library_hash(there | {"driver": "580.1"}) == library_hash(there)
    assert library_hash(there | {"cuda": "0"}) != library_hash(there) != library_hash(plain)


def test_a_library_that_is_not_installed_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(identity, "version", none)
    assert libraries(["megatron"], gpu=False)["megatron-core"] == "none"


def model(folder: Path, content: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text(content)
    return folder


def test_models_count_by_their_content_and_not_by_where_they_lie(tmp_path: Path) -> None:
    there = identify(load(flags={"learner.reference": str(model(tmp_path / "a", "one"))}))
    shutil.copytree(tmp_path / "a", tmp_path / "moved")
    assert identify(load(flags={"learner.reference": str(tmp_path / "moved")})) == there
    assert there.models == {"reference": base_digest(tmp_path / "a")}
    assert str(tmp_path) not in there.text
    model(tmp_path / "a", "another")
    changed = identify(load(flags={"learner.reference": str(tmp_path / "a")}))
    assert changed.config != there.config
    assert identify(load(flags={"learner.teacher": str(tmp_path / "moved")})).config != there.config


@pytest.mark.parametrize("missing", ["config.json", ""])
def test_a_model_that_cannot_be_read_is_named_with_its_setting(tmp_path: Path, missing: str) -> None:
    folder = model(tmp_path / "a", "one")
    (folder / missing).unlink() if missing else shutil.rmtree(folder)
    with pytest.raises(ConfigError, match=r"\[learner\] reward_model: .* cannot be read"):
        identify(load(flags={"learner.reward_model": str(folder)}))


KNOBS = st.dictionaries(st.text(max_size=8), st.one_of(st.floats(allow_nan=False), st.text(max_size=8)), max_size=4)


@given(knobs=KNOBS, lr=st.floats(1e-9, 1), name=st.from_regex(r"[a-z]{1,8}", fullmatch=True))
def test_the_hash_of_the_configuration_is_that_of_its_text(knobs: dict[str, object], lr: float, name: str) -> None:
    settings = load(flags={"learner.lr": lr, "policy.name": name})
    settings.learner.knobs.update(knobs)
    found = identify(settings)
    assert found.config == hashlib.sha256(found.text.encode()).hexdigest()
    said = json.loads(found.text)
    assert (said["policy"], said["learner"]["lr"]) == (name, lr)
    assert "trackers" not in said["learner"]


def test_what_the_ledger_keeps_of_the_configuration_holds_no_password() -> None:
    secret = {"where": "https://me:hunter22@models.example/x?api_key=hunter22", "token": "hunter22"}
    settings = load()
    settings.learner.knobs.update(secret)
    text = identify(settings).text
    assert "hunter22" not in text
    assert json.loads(text)["learner"]["knobs"].keys() == secret.keys()
