"""What would train otherwise than the record says is named, and what the record does not say is not compared."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.consumers.learner.group import identity
from millrace.consumers.learner.group.identity import identify
from millrace.consumers.replay.prove import same_environment
from millrace.consumers.replay.prove.same_environment import TrainingPlace, differences
from millrace.infra.config import load
from millrace.infra.errors import ProofError
from millrace.infra.process import cuda
from tests.support.versions import entry


def here(backend: str) -> TrainingPlace:
    return TrainingPlace(identify(load(flags={"learner.backend": backend})), "cpu", 1)


def recorded(one: TrainingPlace, **libraries: str) -> Any:
    """An entry of what would train here, with these versions on record."""
    mine = one.identity
    said = {"config_hash": mine.config, "code_hash": mine.code, "cpu": mine.cpu, "config": mine.text, "models": {}}
    return entry(1, 0, 1, b"", **said, libraries=libraries, device=one.device, threads=one.threads)


@pytest.mark.parametrize(
    ("backend", "name"),
    [("torch", "torch"), ("deepspeed", "deepspeed"), ("megatron", "megatron-core"), ("torch:d2", "transformers")],
)
def test_another_version_of_what_a_backend_uses_is_named(
    monkeypatch: pytest.MonkeyPatch, backend: str, name: str
) -> None:
    before = here(backend)
    then = recorded(before, **before.identity.libraries)
    assert differences(before, then) == []
    version = identity.version
    monkeypatch.setattr(identity, "version", lambda asked: "0.1" if asked == name else version(asked))
    assert differences(here(backend), then) == [f"{name} is 0.1, was {then['libraries'][name]}"]


@pytest.mark.parametrize("name", ["triton", "cuda", "driver"])
def test_so_are_the_kernels_and_the_driver_of_a_gpu(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(cuda, "usable", lambda: True)
    one = here("torch")
    now = one.identity.libraries[name]
    assert differences(one, recorded(one, **{**one.identity.libraries, name: "0.1"})) == [f"{name} is {now}, was 0.1"]


def test_an_older_entry_is_compared_by_the_names_that_it_has() -> None:
    one = here("megatron")
    old = {name: version for name, version in one.identity.libraries.items() if name != "megatron-core"}
    assert differences(one, recorded(one, **old)) == []
    assert differences(one, recorded(one, **old | {"gone": "1"})) == ["gone is none, was 1"]


@pytest.mark.parametrize("config", ["{", "[]", "null", '{"learner": 1}', '{"learner": {"lr": "fast"}}', "[" * 100_000])
def test_a_configuration_that_no_learner_had_is_named_by_its_version(config: str) -> None:
    one = here("torch")
    forged = {**recorded(one), "config": config, "config_hash": "another"}
    with pytest.raises(ProofError, match="version 1 says what no learner writes"):
        same_environment.settings_of(load(), forged)
    if '"lr"' not in config:  # which is another setting, and is shown as one
        with pytest.raises(ProofError, match="version 1 says what no learner writes"):
            differences(one, forged)
