"""The engine of this machine starts on the newest full weights that still lie there."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.infra.config import load
from millrace.infra.log.base import Outgoing
from millrace.infra.log.memory.bus import MemoryBus
from millrace.infra.machine import local
from millrace.schemas import codec
from tests.support.versions import weights


def test_no_record_among_the_weights_keeps_the_engine_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load(flags={"namespace": "n", "home": str(tmp_path)})
    bus = MemoryBus({f"n.{settings.policy.name}.weights": 1})
    events = [{**weights(v, f"d{v}"), "uri": str(tmp_path / f"v{v}")} for v in range(4)]
    events[3]["mode"] = "adapter"
    for version in (0, 1, 3):
        (tmp_path / f"v{version}").mkdir()
        (tmp_path / f"v{version}" / "config.json").write_text("{}")
    values = [*(codec.encode("WeightVersion", event) for event in events), b"torn", None]
    for value in values:
        bus.publisher().publish(Outgoing(f"n.{settings.policy.name}.weights", b"p", value)).result()
    monkeypatch.setattr(local, "connect", lambda _: bus)
    assert local._newest(settings) == str(tmp_path / "v1")
