from __future__ import annotations

import os
from typing import Any

import pytest

from millrace.infra.workers import key_of, status
from millrace.schemas import codec

ENGINE: dict[str, Any] = {"worker": "engine-0", "incarnation": "i", "role": "engine", "policy": "p", "state": "serving"}


@pytest.mark.parametrize(
    ("more", "label", "adapter"),
    [({}, None, None), ({"version": 3}, "p@3", None), ({"version": 3, "adapter": True}, "p@3", "p@3")],
)
def test_a_status_names_what_is_loaded_and_lapses(more: dict[str, Any], label: str | None, adapter: str | None) -> None:
    said = status("dev.workers", lives_s=2.5, **ENGINE, **more)
    assert (said.topic, said.key) == ("dev.workers", key_of("engine-0", "i"))
    found = codec.decode_as("WorkerStatus", said.value or b"")
    assert found.items() >= ENGINE.items()
    assert (found["label"], found["adapter"], found["pid"]) == (label, adapter, os.getpid())
    assert found["expires_at"] - found["time"] == 2_500_000


def test_starts_of_one_worker_have_keys_of_their_own() -> None:
    assert key_of("engine-0", "a") != key_of("engine-0", "b")
