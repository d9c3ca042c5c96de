from __future__ import annotations

from contextlib import suppress

import pytest

from millrace.trainers.phase_clock import Clock


def test_time_belongs_to_the_innermost_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    clock = Clock()
    with clock.phase("outer"):
        now[0] += 1
        with suppress(ValueError), clock.phase("inner"):
            now[0] += 10
            raise ValueError
        now[0] += 100
        assert clock.drain() == {"outer": 101, "inner": 10}
        now[0] += 1000
    now[0] += 10_000
    assert clock.drain() == {"outer": 1000}
    assert clock.drain() == {}
