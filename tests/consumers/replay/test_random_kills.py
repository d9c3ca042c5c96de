"""kill -9 of `millrace replay branch` and `millrace replay reward` at random moments, over a real broker, each after
some progress of that process: nothing is lost, nothing is doubled, and the end is that of one that nobody killed.
`MILLRACE_REPLAY_KILLS` says how many kills each of them gets."""

from __future__ import annotations

import os
import random
import signal
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from millrace.apps.demo import tiny
from millrace.consumers import policy_names
from millrace.consumers.replay.branch.job import BranchOptions
from millrace.infra.log.base import Bus, Outgoing, TopicSpec
from millrace.infra.log.history.kinds import EVALUATIONS, EVENTS, LEDGER, RAW, TRAJECTORIES, WEIGHTS, topics_of
from millrace.infra.log.history.reader import History
from millrace.infra.log.kafka.bus import KafkaBus
from millrace.schemas.records import Reward
from millrace.testing.world import World
from tests.consumers.replay.deployed import Deployed, deploy, weights
from tests.support.branches import violations
from tests.support.documents import ROOT
from tests.support.forked import Fork
from tests.support.whole import NAMESPACE, POLICY, whole

KILLS = int(os.environ.get("MILLRACE_REPLAY_KILLS", "4"))
SEED = 17
LONGEST_S = 0.3
"""between a kill and the progress that it comes after"""
BRANCH = ["--from-version", "0", "--steps", "24", "--save-every", "1", "--lr", "3e-4", "--batch", "16"]
BRANCH += ["--device", "cpu"]
VERIFIER = """
def second(task, output, episode):
    if episode["trajectory"].endswith("3"):
        raise ValueError("a verdict that fails")
    return {"value": len(output) / 100}
"""
PROGRAM = """
import os, sys
from pathlib import Path
from millrace.infra import faults
from millrace.consumers.replay import rejudge
rejudge.AT_ONCE = 2  # many small transactions instead of one
left = int(os.environ["NTH"])
def passed(name):
    global left
    left -= name in {points!r}
    if left == 0:
        Path(os.environ["PASSED"]).touch()
faults.install(passed)
from millrace.apps.cli.main import app
sys.argv[1:] = {words!r}
app()
"""
WROTE = ("branch.kept", "branch.committed", "replay.committed")
"""points behind which there is something that the next process finds"""

pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.timeout(400 + KILLS * 60)]


class Killer:
    """Runs one command in processes of their own, in `folder`, and kills them."""

    def __init__(self, folder: Path, variables: Mapping[str, str]) -> None:
        self._folder = folder
        self._variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
        self._chance = random.Random(SEED)
        self.kills = 0

    def killed(self, *words: str) -> bool:
        """Whether it was killed before it had ended, a while after it had passed one or two points of `WROTE`."""
        log, mark = self._folder / f"{uuid.uuid4().hex}.log", self._folder / "passed"
        mark.unlink(missing_ok=True)
        process = self._start(log, str(self._chance.randint(1, 2)), mark, words)
        while process.poll() is None and not mark.exists():
            time.sleep(0.005)
        time.sleep(self._chance.random() * LONGEST_S)
        children = self._children(process)
        process.kill()
        code = process.wait(120)
        assert code in (0, -signal.SIGKILL), log.read_text()
        _, alive = psutil.wait_procs(children, timeout=120)
        assert [child for child in alive if child.status() != psutil.STATUS_ZOMBIE] == [], "its own processes end, too"
        self.kills += code != 0
        return code != 0

    def end(self, *words: str) -> str:
        """What it says when nobody kills it."""
        log = self._folder / f"{uuid.uuid4().hex}.log"
        assert self._start(log, "-1", self._folder / "never", words).wait(300) == 0, log.read_text()
        return log.read_text()

    def _start(self, log: Path, nth: str, mark: Path, words: tuple[str, ...]) -> Fork:
        source = PROGRAM.format(points=WROTE, words=[*words])
        return Fork(source, {**self._variables, "NTH": nth, "PASSED": str(mark)}, self._folder, log)

    @staticmethod
    def _children(process: Fork) -> list[psutil.Process]:
        try:
            return psutil.Process(process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []


# -- a branch


@pytest.fixture(scope="module")
def deployed(broker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    folder = tmp_path_factory.mktemp("deployed")
    tiny.make_sort_policy(folder / "beginner", target=0.2)
    with deploy(broker, folder / "beginner", folder) as made:
        yield made


def trained(it: Deployed, name: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What decides in every weight event and ledger entry of a branch, in the order of the log."""
    past = History(it.bus, it.settings.namespace, name)
    fields = ("version", "parent_policy", "parent", "digest", "selection", "selection_digest", "selection_places")
    events = [{field: row.record[field] for field in fields} for row in past.rows(WEIGHTS)]
    entries = [row.record for row in past.rows(LEDGER)]
    assert len({entry["config_hash"] for entry in entries[1:]}) == 1, "one configuration, which names the branch"
    return events, [{field: entry[field] for field in ("version", "digest", "groups")} for entry in entries]


def files(it: Deployed, name: str) -> list[str]:
    """Names of all that lies in the directory of a branch's versions."""
    root = policy_names.weights_root(BranchOptions(name).settings(it.settings))
    return sorted(path.name for path in root.iterdir())


def test_branches_killed_at_random_end_with_the_versions_of_one_that_was_not(
    deployed: Deployed, tmp_path: Path
) -> None:
    killer = Killer(tmp_path, deployed.variables)
    killer.end("replay", "branch", "whole", *BRANCH)
    assert [version for version, _ in weights(deployed, "whole")] == list(range(25))
    number, at = 0, set[tuple[int, int]]()
    while killer.kills < KILLS:
        if killer.killed("replay", "branch", f"killed-{number}", *BRANCH):
            at.add((number, len(weights(deployed, f"killed-{number}"))))
        else:
            number += 1
    for each in range(number + 1):
        name = f"killed-{each}"
        killer.end("replay", "branch", name, *BRANCH)
        assert trained(deployed, name) == trained(deployed, "whole")
        assert violations(deployed.bus, deployed.settings, name) == []
        assert files(deployed, name) == files(deployed, "whole"), "nothing that a dead one left stays"
    assert len(at) > KILLS // 4, "they died at different versions"
    print(killer.kills, "kills of", number + 1, "branches, at", len(at), "different versions")


# -- rewards


def copied(world: World, bus: Bus, names: Mapping[Any, str]) -> None:
    """What a world holds of these kinds, in topics of their own."""
    lying = topics_of(NAMESPACE, POLICY)
    bus.ensure_topics([TopicSpec(name, 2) for name in names.values()])
    with bus.publisher() as publisher:
        for kind in (EVENTS, TRAJECTORIES, EVALUATIONS):
            for partition in range(world.bus.partitions(lying[kind])):
                for r in world.bus.read(lying[kind], partition):
                    publisher.publish(Outgoing(names[kind], r.key, r.value, r.headers))
        publisher.flush(60)


def verdicts(bus: Bus, namespace: str, replay: str) -> list[tuple[str, float | None, str | None]]:
    """Trajectory, value and failure of every reward of a replay, in any order."""
    rows = [(row["trajectory"], row.body) for row in History(bus, namespace, POLICY).rows(RAW)]
    bodies: list[tuple[str, Reward]] = [(name, body) for name, body in rows if body["replay"] == replay]
    return sorted((name, body["value"], body["failure"]) for name, body in bodies)


def test_rewards_of_replays_killed_at_random_are_those_of_one_that_was_not(
    broker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "random_kills_rewards.py").write_text(VERIFIER)
    namespace = f"k{uuid.uuid4().hex[:8]}"
    command = [
        "--set",
        f"namespace={namespace}",
        "--set",
        f"policy.name={POLICY}",
        "--set",
        f"kafka.bootstrap={broker}",
    ]
    command += ["--set", "kafka.local=false", "replay", "reward", "--verifier", "random_kills_rewards:second"]
    command += ["--rubric", "v2", "--split", "all", "--name"]
    killer, before = Killer(tmp_path, {}), list[tuple[str, float | None]]()

    def sealed(world: World) -> list[tuple[str, float | None]]:
        past = History(world.bus, NAMESPACE, POLICY)
        return sorted((row["id"], row["reward"]) for kind in (TRAJECTORIES, EVALUATIONS) for row in past.rows(kind))

    def later(world: World) -> None:
        world.drain()
        before.extend(sealed(world))
        with KafkaBus(broker) as bus:
            copied(world, bus, topics_of(namespace, POLICY))
            killer.end(*command, "whole")
            clean = verdicts(bus, namespace, "whole")
            assert len({name for name, _, _ in clean}) == len(clean) > len(before) // 2
            number, at = 0, set[tuple[int, int]]()
            while killer.kills < KILLS:
                if killer.killed(*command, f"killed-{number}"):
                    at.add((number, len(verdicts(bus, namespace, f"killed-{number}"))))
                else:
                    number += 1
            for each in range(number + 1):
                killer.end(*command, f"killed-{each}")
                assert verdicts(bus, namespace, f"killed-{each}") == clean
            assert len(at) > KILLS // 4, "they died at different rewards"
            with world.bus.publisher() as publisher:
                for partition in range(2):
                    for r in bus.read(f"{namespace}.raw", partition):
                        publisher.publish(Outgoing(f"{NAMESPACE}.raw", r.key, r.value, r.headers))
            print(killer.kills, "kills of", number + 1, "replays of", len(clean), "rewards, at", len(at), "places")
        world.drain(100_000)

    made = whole(1, 600, later=later)
    past = History(made.bus, NAMESPACE, POLICY)
    rows = past.rows(EVENTS, only=lambda r: r.headers.get("kind") == b"reward")
    admitted = [
        body["reward_id"] for body in (row.body for row in rows) if (body["replay"] or "").startswith("killed-")
    ]
    assert len(admitted) == len(set(admitted)) >= len(before) // 2
    report = made.audit()
    assert report.clean, report.violations[:3]
    now = [(row["id"], row["reward"]) for kind in (TRAJECTORIES, EVALUATIONS) for row in past.rows(kind)]
    assert sorted(now) == before, "nothing sealed changed"
