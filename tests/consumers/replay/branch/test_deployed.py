"""`millrace replay branch` on a real broker: processes that are killed, and docs/branch.md, its rewards last."""

from __future__ import annotations

import os
import re
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pytest
from typer.testing import CliRunner

from millrace.apps.cli.main import app
from millrace.consumers import policy_names
from millrace.consumers.replay.branch import selection_file
from millrace.consumers.replay.branch.job import BranchOptions
from millrace.consumers.replay.sql_selection import one
from millrace.consumers.warehouse.ingest.ingest import Ingest
from millrace.consumers.warehouse.open_store import make_tables
from millrace.consumers.warehouse.store.directory import TableDirectory
from millrace.infra.config import Settings
from millrace.infra.log.base import Bus
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.history.kinds import TRAJECTORIES, WEIGHTS
from millrace.infra.log.history.reader import History
from tests.consumers.replay.branch.judged import admit, end
from tests.consumers.replay.deployed import GROUPS, PROGRAM, SHORT, SIZE, VERIFIER, Deployed, deploy, weights
from tests.support.branches import violations
from tests.support.documents import BRANCH, ROOT, RUN_BY, blocks
from tests.support.forked import Fork

pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.timeout(600)]

PAGE = ROOT / "docs" / "branch.md"
COMMANDS = [command for block in blocks(PAGE) if block.language == "sh" for command in block.commands]
KILLS = [
    "branch.kept",
    "branch.begun",
    "branch.after_step",
    "branch.saved",
    "branch.sent_weights",
    "branch.before_commit",
    "branch.committed",
    "branch.sent_weights",
]
"""where each process dies in turn; every version is written by one that goes on with what a dead one left"""


def fill(settings: Settings, bus: Bus) -> None:
    """Bring the log into the tables."""
    with TableDirectory(settings.warehouse_home, memory_mb=512) as store:
        make_tables(store)
        Ingest(bus, store, settings.namespace, ClaimStore(settings.claims).behind).catch_up()


@pytest.fixture(scope="module")
def deployed(broker: str, beginner: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    with deploy(broker, beginner, tmp_path_factory.mktemp("deployed")) as made:
        fill(made.settings, made.bus)
        yield made


@pytest.fixture(autouse=True)
def there(deployed: Deployed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in deployed.variables.items():
        monkeypatch.setenv(name, value)


def run(*words: str) -> tuple[int, str]:
    """Exit code and what was said."""
    done = CliRunner().invoke(app, words)
    return done.exit_code, done.output


def test_killed_processes_end_with_the_bytes_of_one_that_was_not(deployed: Deployed, tmp_path: Path) -> None:
    code, said = run("replay", "branch", "whole", *SHORT)
    assert code == 0, said
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    source = PROGRAM.format(words=["replay", "branch", "dies", *SHORT])
    for number, point in enumerate([*KILLS, ""]):
        log = tmp_path / f"{number}.log"
        process = Fork(source, {**environment, "MILLRACE_KILL": point}, tmp_path, log)
        code = process.wait(300)
        assert code == (-signal.SIGKILL if point else 0), f"{point}: {log.read_text()}"
    assert [version for version, _ in weights(deployed, "dies")] == [0, 1, 2, 3], "none is doubled, none is missing"
    assert weights(deployed, "dies") == weights(deployed, "whole")
    assert violations(deployed.bus, deployed.settings, "dies") == []


def test_the_page_does_what_it_says(deployed: Deployed, tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text(VERIFIER)
    settings, bus = deployed.settings, deployed.bus
    answers = {}
    for command in sorted(COMMANDS, key=lambda command: "reward" in command):
        assert RUN_BY[command] == BRANCH
        if command.startswith("millrace replay reward"):  # no stage wrote these, so no audit is clean from here on
            end(bus, settings.namespace, settings.policy.name)
        code, answers[command] = run(*shlex.split(command)[1:])
        assert code == 0, f"{command}: {answers[command]}"
        if command.startswith("millrace replay reward"):
            assert admit(bus, settings.namespace, settings.policy.name) == GROUPS * SIZE
            fill(settings, bus)
    for command, said in answers.items():
        words = shlex.split(command)
        if words[1:3] != ["replay", "branch"]:
            continue
        assert re.search(r"items from \d+ of \d+ trajectories", said), said
        assert ("reach: ESS/n of sequences" in said) == ("grpo" in words)
        (first, *trained) = History(bus, settings.namespace, words[3]).rows(WEIGHTS)
        assert (first["parent_policy"], first["parent"]) == (settings.policy.name, 0)
        asked = one(words[words.index("--select") + 1]) if "--select" in words else "all"
        assert trained
        assert {row["selection"] for row in trained} == {asked}
    past = History(bus, settings.namespace, settings.policy.name)
    old = fmean(row["reward"] for row in past.rows(TRAJECTORIES))
    (means,) = [said for command, said in answers.items() if "avg(value)" in command]
    assert means.split()[-3:-2] == [str(GROUPS * SIZE)]
    assert [float(mean) for mean in means.split()[-2:]] == pytest.approx([old, 1 - old], abs=1e-5)
    strict = History(bus, settings.namespace, "strict")
    assert {(row["reward_source"], row["reward_rubric"]) for row in strict.rows(WEIGHTS) if row["version"]} == {
        ("replay", "v2")
    }
    sealed = {row.place: row["reward"] for row in History(bus, settings.namespace, "pico").rows(TRAJECTORIES)}
    items = selection_file.read(Path(policy_names.weights_root(BranchOptions("strict").settings(settings)))).items
    assert [item.rewards[0] for item in items] == [1 - (sealed[item.places[0]] or 0) for item in items]
    assert len(items) > 0, "the best by the new rewards are the worst by the sealed ones"
    code, said = run("--set", "policy.name=strict", "replay", "prove", "all")
    assert code == 1
    assert "of strict" in said
    assert "make the branch again under another name" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--select", "SELECT 1 AS a"], "the query gives a, and nothing says where the trajectories lie: select topic"),
        (["--select", "SELECT 1; SELECT 2"], "a selection is one query"),
        (["--select", "SELECT topic FROM nowhere"], "Tables: "),
        (["--select", "no.sql"], "no.sql cannot be read"),
        (["--select", "SELECT * FROM trajectories WHERE 0"], "nothing is left to learn from"),
        (["--select", "SELECT 'x' AS id"], "no trajectory of this policy has the id (1)"),
        (["--select", "SELECT 1", "--places", "places.csv"], "give one of them"),
        (["--places", "places.csv"], "places.csv, row 1 is no place: it needs the columns topic, part and off"),
        (["--places", "places.jsonl"], "places.jsonl, row 2 is no JSON"),
        (["--knob", "beta"], "write it as key=value"),
        (["--algorithm", "ppo"], "ppo does not learn from history: choose sft, awr"),
        (["--rewards", "replay/v9"], "no replay gave rewards of replay/v9"),
        (["--from-version", "7"], "pico has no version 7"),
    ],
)
def test_what_cannot_be_a_branch_is_an_error_and_announces_nothing(
    deployed: Deployed, tmp_path: Path, words: list[str], said: str
) -> None:
    (tmp_path / "places.csv").write_text("topic,part\nx,1\n")
    (tmp_path / "places.jsonl").write_text('{"topic": "x", "part": 0, "off": 0}\n{"topic"\n')
    code, output = run("replay", "branch", "never", *words)
    assert code == 1
    assert said in " ".join(output.split())
    assert not [topic for topic in deployed.bus.topics(f"{deployed.settings.namespace}.") if ".never." in topic]


def test_places_of_a_file_are_learned_from(deployed: Deployed, tmp_path: Path) -> None:
    query = "SELECT topic, part, off FROM trajectories ORDER BY part, off LIMIT 100"
    assert run("sql", query, "-o", "some.csv")[0] == 0
    code, said = run("replay", "branch", "listed", *SHORT[:2], "--places", "some.csv", "--steps", "1")
    assert code == 0, said
    assert "of 100 trajectories" in said
