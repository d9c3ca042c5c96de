"""What the settings say of how long raw content is kept reaches every place that holds it: the topic, the gateway's
capture log, and the bodies of large records."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import pytest

from millrace.infra.config import Settings, load
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.memory.bus import MemoryBus
from millrace.infra.log.topics import PARTS
from millrace.producers.capture.entry import Entry
from millrace.producers.capture.log import CaptureLog
from millrace.producers.capture.segments import segments
from millrace.producers.gateway.serve import capture
from millrace.streams import serve as stages

HOURS = 3
KEPT_S = HOURS * 3600


def made(folder: Path) -> Settings:
    return load(flags={"home": str(folder / "home"), "topics.short_hours": HOURS})


def test_the_topic_forgets_it_in_parts(tmp_path: Path) -> None:
    (raw,) = [spec for spec in made(tmp_path).layout.specs() if spec.name.endswith(".raw")]
    assert raw.config["cleanup.policy"] == "delete"
    assert raw.config["retention.ms"] == str(KEPT_S * 1000)
    assert raw.config["segment.ms"] == str(KEPT_S * 1000 // PARTS)


@pytest.mark.parametrize(("age_s", "gone"), [(KEPT_S + 1800, 1), (KEPT_S - 1800, 0)])
def test_the_gateway_forgets_what_it_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age_s: int, gone: int
) -> None:
    settings = made(tmp_path)
    log, forwarder = capture(settings, MemoryBus({f"{settings.namespace}.raw": 1}))
    assert (log.folder, log.segment_s) == (settings.gateway.capture_dir, KEPT_S / PARTS)
    log.append(Entry("k", {}, b"words"))
    log.release(1, 0)
    (file,) = segments(log.folder)
    written = time.time() - age_s
    os.utime(file.path, (written, written))
    forgot: list[int] = []
    looked = threading.Event()

    def forget(older_than_s: float) -> int:
        forgot.append(CaptureLog.forget(log, older_than_s))
        looked.set()
        return forgot[-1]

    monkeypatch.setattr(log, "forget", forget)
    forwarder.start()
    assert looked.wait(120), "the forwarder looks for what is old"
    forwarder.close()
    log.close()
    assert (forgot[0], file.path.exists()) == (gone, not gone)


def test_refine_removes_the_bodies_of_large_records_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, sweeps, ran = made(tmp_path), list[dict[str, Any]](), list[bool]()

    class Sweeping:
        def __init__(self, connect: Any, namespace: str, claims: Any, **often: float) -> None:
            self.found = {"namespace": namespace, "claims": claims._root, **often, "on": False}
            sweeps.append(self.found)

        def __enter__(self) -> None:
            self.found["on"] = True

        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
        ) -> None:
            self.found["on"] = False

    monkeypatch.setattr(stages, "Sweeping", Sweeping)
    monkeypatch.setattr(
        stages, "GuardedDetectors", lambda names: SimpleNamespace(close=lambda: None, version=lambda: "none")
    )
    monkeypatch.setattr(stages, "run", lambda settings, stage: ran.append(sweeps[0]["on"]))
    monkeypatch.setenv("KF_RULE_CACHE_DIR", str(tmp_path))
    stages.run_refine(settings)
    assert ran == [True]
    said = {"namespace": settings.namespace, "claims": ClaimStore(settings.claims)._root}
    assert sweeps == [{**said, "patience_s": KEPT_S, "interval_s": KEPT_S / PARTS, "on": False}]
