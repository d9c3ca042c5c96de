"""kill -9 of `millrace replay branch` and `millrace replay reward` at random moments, as processes over a real broker:
what stands at the end is what one gives that nobody killed. `MILLRACE_REPLAY_KILLS` says how often each."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.consumers.history.kinds import RAW, TRAJECTORIES
from millrace.consumers.history.reader import History
from tests.support.branches import violations
from tests.support.deployed import GROUPS, PROGRAM, SHORT, SIZE, VERIFIER, Deployed, deploy, weights
from tests.support.documents import ROOT
from tests.support.forked import Fork
from tests.support.judged import end

KILLS = int(os.environ.get("MILLRACE_REPLAY_KILLS", "2"))
SEED = 7

pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.timeout(300 + 60 * KILLS)]


@pytest.fixture(scope="module")
def deployed(broker: str, beginner: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    with deploy(broker, beginner, tmp_path_factory.mktemp("deployed")) as made:
        yield made


class Series:
    """A command, under one name after the other: each is killed, begun again and killed again, until one process comes
    to its end; so often that `KILLS` of them died."""

    def __init__(self, deployed: Deployed, folder: Path, words: Callable[[str], list[str]]) -> None:
        self._environment = {**os.environ, **deployed.variables, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._folder = folder
        self._words = words
        self.log = folder / "log"

    def started(self, name: str) -> Fork:
        return Fork(PROGRAM.format(words=self._words(name)), self._environment, self._folder, self.log)

    def run(self, clean: str, found: Callable[[str], Any], state: Callable[[str], Any]) -> Counter[Any]:
        """What `state` said behind each kill. found: what stands at the end under a name, equal for all."""
        chance, kills, names, died = random.Random(SEED), 0, 0, Counter[Any]()
        began = time.monotonic()
        assert self.started(clean).wait(300) == 0, self.log.read_text()
        longest_s, want = time.monotonic() - began, found(clean)
        while kills < KILLS or names == 0:
            names += 1
            ended = False
            while not ended:
                process = self.started(name := f"killed{names}")
                if kills < KILLS:
                    time.sleep(chance.uniform(0.3, 1) * longest_s)
                    process.kill()
                code = process.wait(300)
                assert code in (0, -signal.SIGKILL), self.log.read_text()
                ended = code == 0
                if not ended:
                    kills += 1
                    died[state(name)] += 1
                longest_s *= 0.9 if ended else 1.05
            assert found(name) == want, name
        print(f"{kills} kills, {names} names, states {dict(died)}")
        return died


def test_a_branch_ends_with_the_bytes_of_one_that_nobody_killed(deployed: Deployed, tmp_path: Path) -> None:
    series = Series(deployed, tmp_path, lambda name: ["replay", "branch", name, *SHORT, "--save-every", "1"])
    settings, bus = deployed.settings, deployed.bus

    def found(name: str) -> Any:
        assert violations(bus, settings, name) == []
        return weights(deployed, name)

    series.run("whole", found, lambda name: len(weights(deployed, name)))
    assert [version for version, _ in weights(deployed, "whole")] == [0, 1, 2, 3, 4, 5]


def test_a_reward_is_given_once_as_one_gives_it_that_nobody_killed(deployed: Deployed, tmp_path: Path) -> None:
    settings, bus = deployed.settings, deployed.bus
    (tmp_path / "my_rewards.py").write_text(VERIFIER)
    end(bus, settings.namespace, settings.policy.name)
    verifier = ["--verifier", "my_rewards:strict", "--rubric", "v2"]
    series = Series(deployed, tmp_path, lambda name: ["replay", "reward", *verifier, "--name", name])
    past = History(bus, settings.namespace, settings.policy.name)

    def given(name: str) -> list[tuple[str, float]]:
        """Trajectory and value of each reward of a replay, as often as the log holds it."""
        rewards = ((row["trajectory"], row.body) for row in past.rows(RAW) if row["kind"] == "reward")
        return sorted((trajectory, reward["value"]) for trajectory, reward in rewards if reward["replay"] == name)

    series.run("whole", given, lambda name: len(given(name)))
    sealed = {row["id"]: row["reward"] for row in past.rows(TRAJECTORIES)}
    assert given("whole") == sorted((name, 1 - reward) for name, reward in sealed.items())
    assert len(sealed) == GROUPS * SIZE
