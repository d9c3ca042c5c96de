"""What the demo may remove: a former demo, nothing else."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import cast

import pytest
from rich.console import Console

from millrace.apps.demo.fleet import DemoFleet
from millrace.apps.demo.run import DemoScreen, _configure, _name_failing, make_empty, summary
from millrace.consumers.tell.status import StatusWatch
from millrace.infra.config import Settings, load
from millrace.infra.errors import ConfigError
from millrace.infra.log.memory.bus import MemoryBus
from millrace.infra.machine.supervisor import ProgramState
from millrace.schemas.records import LedgerEntry


def test_a_directory_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    (tmp_path / "millrace.toml").write_text("namespace = 'demo'\nhome = '.millrace'\n")
    with pytest.raises(ConfigError, match="no demo wrote"):
        make_empty(tmp_path)
    assert (tmp_path / "thesis.txt").exists()


def test_a_former_demo_is_removed(tmp_path: Path) -> None:
    home = tmp_path / "demo"
    make_empty(home)
    _configure(home, 0, None)
    (home / "logs").mkdir()
    make_empty(home)
    assert not list(home.iterdir())


def test_the_last_screen_says_what_happened_and_where_to_go(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    bus = MemoryBus()
    bus.ensure_topics(load(flags={"namespace": "demo", "policy.name": "sort"}).layout.specs())
    watch = StatusWatch(bus, "demo", "sort")
    for n in range(1, 61):
        metrics = {"samples": 100.0, "reward_mean": n / 100}
        watch.versions.append(cast(LedgerEntry, {"version": n, "time": n * 10_000_000, "metrics": metrics}))
    lines = summary(settings, watch, 700.0, tmp_path / "report.html")
    assert len(lines) == 5
    text = "\n".join(lines)
    assert "60 versions on 6000 samples in 0:11:40" in text
    assert "10 samples/s" in text, "59 versions of 100 samples took 590 s"
    assert "from 0.055 (first ten versions) to 0.555 (last ten)" in text
    assert f"cd {tmp_path} && millrace up" in text


def test_every_program_has_the_home_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path / "elsewhere"))
    make_empty(tmp_path / "demo")
    settings, file = _configure(tmp_path / "demo", 0, None)
    assert "MILLRACE_HOME" not in os.environ
    assert settings.home == load(file).home == Path(settings.rollout.tasks).parent == tmp_path / "demo"


def test_a_program_that_keeps_ending_is_named_once_until_it_runs_again() -> None:
    class Fleet:
        logs = Path("logs")
        bad = True

        def states(self) -> list[ProgramState]:
            return [
                ProgramState("gateway", "RUNNING", 1, 99.0, ""),
                ProgramState("rollout-0", "BACKOFF", None, 0.0, "no tasks in x", failing=self.bad),
            ]

    out = io.StringIO()
    fleet, screen = Fleet(), DemoScreen(Console(file=out), 10)
    known: set[str] = set()
    for bad in (True, True, False, True):
        fleet.bad = bad
        known = _name_failing(cast(DemoFleet, fleet), known, screen)
    assert out.getvalue().count("rollout-0 keeps ending: no tasks in x (its log: logs/rollout-0.log)") == 2
    assert "gateway" not in out.getvalue()
