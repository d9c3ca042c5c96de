"""Learners that came and died on a real broker, proven by processes of as many ranks; the command from outside."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from millrace.apps.cli.main import app
from millrace.consumers.replay.prove import cell_assignment
from millrace.consumers.replay.prove.command import ReplayOptions, proving
from tests.consumers.cells import Cells
from tests.support import forked
from tests.support.documents import REPLAY, RUN_BY
from tests.support.learners import entries, until

pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[3]


def words(it: Cells, versions: str = "all", **options: Any) -> list[tuple[int, str, str]]:
    chosen = ReplayOptions(versions, **options)
    with proving(it.settings, it.bus, chosen, forked.server()) as (_, outcomes):
        return [(outcome.version, outcome.word, outcome.layout) for outcome in outcomes]


def test_versions_of_ranks_that_came_and_died_are_proven(
    tmp_path: Path, broker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Cells(tmp_path / "run", broker, "torch", {"learner.keep": 1}) as it:
        it.start()
        it.step()
        it.start()
        until(lambda: it.members() == 2, it.learners)
        it.step()
        it.step()
        it.dies("learner.after_step", rank=1)
        until(lambda: len(it.ledger()) == 5, it.learners)
        it.start()
        until(lambda: it.members() == 2, it.learners)
        it.step()
        for number in it.alive():
            it.learners.signal(number, signal.SIGTERM)
            assert it.learners.wait(number) == 0
        rows = entries(it.bus, it.settings)[1:]
        worlds = [len(row["ranks"]) for row in rows]
        assert worlds == [1, 2, 2, 1, 2]
        assert words(it) == [(row["version"], "equal", row["layout"]) for row in rows]

        for row in rows:  # what an old entry does not say, the range assignor does
            said = {group["seq"]: group["cell"] for group in row["groups"]}
            silent: Any = {**row, "groups": [{**group, "cell": -1} for group in row["groups"]]}
            resolutions = {group["seq"]: tokens(it, group) for group in row["groups"]}
            assert cell_assignment.manifest(silent, cell_assignment.cells_of(silent), resolutions, 4, 1)[1] == said

        private = tmp_path / "private"
        private.mkdir()
        monkeypatch.chdir(private)
        monkeypatch.setattr("tempfile.tempdir", str(private))
        monkeypatch.setenv("MILLRACE_CONFIG", str(it.learners.file))
        monkeypatch.setattr("multiprocessing.get_context", lambda _: forked.server())
        for line in [line for line, runner in RUN_BY.items() if runner == REPLAY]:
            done = CliRunner().invoke(app, line.split()[1:])
            assert done.exit_code == 0, f"{line}: {done.output}"
            assert "equal" in done.output
        shutil.rmtree(private / "steps")
        assert not list(private.iterdir())

        # Killed in the middle, it leaves no process behind, and the next one makes room.
        before = it.bus.ends(f"{it.settings.namespace}.pico.ledger")
        doomed = subprocess.Popen(
            [sys.executable, "-m", "millrace.apps.cli.main", "replay", "prove", "all"],
            env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(private)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        until(lambda: any(private.glob("millrace-replay-*/versions/v1-*")) or doomed.poll() is not None, it.learners)
        assert doomed.poll() is None, doomed.communicate()
        ranks = psutil.Process(doomed.pid).children(recursive=True)
        assert len(ranks) >= 2
        doomed.kill()
        doomed.communicate()
        deadline = time.monotonic() + 60
        while any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks):
            assert time.monotonic() < deadline, ranks
            time.sleep(0.05)
        assert any(private.iterdir())
        done = CliRunner().invoke(app, ["replay", "prove", "2", "--json"])
        assert done.exit_code == 0, done.output
        said = json.loads(done.stdout)["versions"]
        assert [(one["version"], one["word"]) for one in said] == [(1, "equal"), (2, "equal")]
        assert not list(private.iterdir())
        assert it.bus.ends(f"{it.settings.namespace}.pico.ledger") == before


def tokens(it: Cells, group: Any) -> int:
    """Of a group's samples, as its resolution says."""
    from tests.support.feed import PROMPT, trajectory

    made = [trajectory("pico", group["seq"], sample, size=2) for sample in range(2)]
    assert all(sample["length"] > PROMPT for sample in made)
    return sum(sample["length"] for sample in made)


def test_cells_that_share_the_model_are_proven_and_compared_with_one_rank(tmp_path: Path, broker: str) -> None:
    with Cells(tmp_path, broker, "torch:t2", {"learner.keep": 1}) as it:
        it.start(2)
        it.step()
        it.step()
        assert words(it, "2", layout="torch:d1") == [
            (2, "equal", "torch:d1t2"),
            (2, "close", "torch:d1"),
        ]
