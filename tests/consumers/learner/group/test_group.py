"""Learner processes on the real broker: joins, deaths, zombies, garbage, full disks; what the log says afterwards."""

from __future__ import annotations

import re
import resource
import signal
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from millrace.consumers import policy_names
from millrace.infra.config import Settings
from millrace.infra.log.kafka.bus import KafkaBus
from millrace.trainers.errors import CorruptCheckpoint
from millrace.trainers.weights import checkpoint, manifest
from tests.consumers.learner.group.garbage import Garbage
from tests.support.fault_points import fault_points
from tests.support.feed import feed, settings_for, start_policy
from tests.support.learners import Learners, Place, entries, until, version

pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.timeout(400)]


class Deployment:
    """A policy with ready groups, and its learners."""

    def __init__(self, folder: Path, bootstrap: str, versions: int) -> None:
        self.settings: Settings
        self.settings, file = settings_for(folder, bootstrap, f"t{uuid.uuid4().hex[:8]}")
        self.bus = KafkaBus(bootstrap)
        start_policy(self.settings, self.bus, folder)
        self.fed = 0
        self.feed(versions)
        self.learners = Learners(folder, file)

    def feed(self, versions: int) -> None:
        """Make the batches of so many more versions ready."""
        feed(self.bus, self.settings, range(self.fed, self.fed + 4 * versions))
        self.fed += 4 * versions

    def start(self, count: int = 1, **environment: str) -> list[int]:
        return [self.learners.start(**environment) for _ in range(count)]

    def states(self, number: int) -> list[str]:
        """What a learner's state machine has passed."""
        return [name for _, name in self.learners.times(number)]

    def world(self) -> int:
        """Members of the group that have partitions, once it is stable; 0 before."""
        view = self.bus.group(policy_names.group(self.settings))
        return sum(bool(member.partitions) for member in view.members) if view.stable else 0

    def idle(self) -> list[int]:
        """Learners that are members without a partition, once the group is stable; none before."""
        view = self.bus.group(policy_names.group(self.settings))
        waiting = [member.client_id for member in view.members if view.stable and not member.partitions]
        return [n for n in range(len(self.learners.processes)) if any(self.advertised(n, name) for name in waiting)]

    def advertised(self, number: int, client_id: str) -> bool:
        """Whether a client id is that of this learner."""
        ports = [name.split()[1] for _, name in self.learners.times(number) if name.startswith("port ")]
        return any(client_id.endswith(f":{port}") for port in ports)

    def together(self, count: int, **environment: str) -> None:
        """Start `count` learners and wait until they share the partitions."""
        self.start(count, **environment)
        until(lambda: self.world() == count, self.learners)

    def at_least(self, wanted: int, timeout_s: float = 180) -> None:
        until(lambda: version(self.bus, self.settings) >= wanted, self.learners, timeout_s)

    def step_by(self, count: int = 1) -> None:
        """Feed `count` more batches, and wait for their versions."""
        now = self.fed // 4
        self.at_least(now)
        self.feed(count)
        self.at_least(now + count)

    def leader(self) -> int:
        """Which learner led the step of the newest version."""
        leader = entries(self.bus, self.settings)[-1]["leader"]
        return next(n for n in range(len(self.learners.processes)) if f":{self.learners.port(n)}-" in leader)

    def fill_disk(self, number: int) -> None:
        """From now on a learner can write no file as large as its weights, as on a disk that has filled up."""
        pid = self.learners.processes[number].pid
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (100_000, hard))

    def listening(self) -> list[int]:
        """Every port on which a learner that lives listens."""
        ports: list[int] = []
        for process in self.learners.processes:
            with suppress(psutil.NoSuchProcess):
                sockets = psutil.Process(process.pid).net_connections("tcp")
                ports += [one.laddr.port for one in sockets if one.status == psutil.CONN_LISTEN]
        return ports

    def ledger(self) -> list[Mapping[str, Any]]:
        """The ledger, after checking everything that it and the files claim."""
        rows = entries(self.bus, self.settings)
        assert [row["version"] for row in rows] == list(range(len(rows)))
        for row in rows[1:]:
            assert [group["seq"] for group in row["groups"]] == list(range(row["seq_lo"], row["seq_hi"]))
            assert sum(share["samples"] for share in row["ranks"]) == 8
            assert not any(group["lost"] for group in row["groups"])
        for path in policy_names.weights_root(self.settings).glob("v*"):
            number, _, short = path.name[1:].partition("-")
            if int(number) < len(rows) and rows[int(number)]["digest"].startswith(short):
                try:
                    manifest.verify(path, rows[int(number)]["digest"])
                except (CorruptCheckpoint, OSError):
                    if path.exists():  # else a learner collected it meanwhile: it goes by one rename
                        raise
        return rows

    def weights(self) -> dict[str, torch.Tensor]:
        """Of the newest version."""
        row = entries(self.bus, self.settings)[-1]
        name = f"v{row['version']}-{row['digest'][:12]}"
        return dict(checkpoint.read(policy_names.weights_root(self.settings) / name).weights)


@pytest.fixture
def deploy(tmp_path: Path, broker: str) -> Iterator[Callable[[int], Deployment]]:
    made: list[Deployment] = []

    def make(versions: int) -> Deployment:
        folder = tmp_path / f"d{len(made)}"
        folder.mkdir()
        made.append(Deployment(folder, broker, versions))
        return made[-1]

    yield make
    for one in made:
        with one.learners:
            pass
        one.bus.close()


def reference(place: Callable[[], Place], versions: int) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Digests and last weights of one uninterrupted learner over the same groups, in this process."""
    whole = place()
    feed(whole.bus, whole.settings, range(4 * versions))
    whole.learn(versions)
    row = entries(whole.bus, whole.settings)
    name = f"v{versions}-{row[-1]['digest'][:12]}"
    state = checkpoint.read(policy_names.weights_root(whole.settings) / name)
    return [one["digest"] for one in row], dict(state.weights)


def drift(one: Mapping[str, torch.Tensor], two: Mapping[str, torch.Tensor]) -> float:
    return max(float((one[name] - two[name]).abs().max()) for name in one)


def test_three_learners_share_every_step_and_stop_when_asked(deploy: Callable[[int], Deployment]) -> None:
    it = deploy(0)
    it.together(3)
    it.step_by(3)
    rows = it.ledger()
    assert rows[-1]["layout"] == "torch:d3"
    assert all(share["tokens"] > 0 for share in rows[-1]["ranks"])
    for number in range(3):
        it.learners.signal(number, signal.SIGTERM)
    assert [it.learners.wait(number) for number in range(3)] == [0, 0, 0]


def points() -> list[str]:
    ours = [name for name in fault_points("consumers") if name.startswith(("learner.", "checkpoint."))]
    return [*ours, *(name for name in fault_points("infra") if name.startswith("transactor."))]


def test_one_learner_killed_where_it_matters_gives_the_bytes_of_no_kill(
    deploy: Callable[[int], Deployment], place: Callable[[], Place], tmp_path: Path
) -> None:
    """Alone, so that the layout never changes. `test_learner` does the same at every point over the bus in memory."""
    names = ["checkpoint.after_write", "checkpoint.after_rename", "transactor.after_offsets", "learner.after_commit"]
    assert set(names) <= set(points())
    versions = 2 * len(names) + 1
    digests, _ = reference(place, versions)
    it = deploy(versions)
    for name in names:
        once = tmp_path / f"once-{name}"
        (number,) = it.start(MILLRACE_KILL=f"{name}:2", MILLRACE_KILL_ONCE=str(once))
        assert it.learners.wait(number, 180) == -signal.SIGKILL, f"{name}\n{it.learners.output(number)}"
    it.start()
    it.at_least(versions)
    assert [row["digest"] for row in it.ledger()] == digests


@pytest.mark.timeout(1200)
def test_three_learners_lose_one_at_every_point_and_go_on(
    deploy: Callable[[int], Deployment], place: Callable[[], Place], tmp_path: Path
) -> None:
    """Whoever passes an armed point first dies; the others commit the next version, and a replacement joins."""
    armed = tmp_path / "armed"
    armed.mkdir()
    it = deploy(0)
    it.together(3, MILLRACE_KILL_DIR=str(armed))
    it.step_by()
    for name in points():
        (armed / name).touch()
        if "fence" in name:  # passed when a generation begins: make one
            it.start(MILLRACE_KILL_DIR=str(armed))
        while (armed / name).exists():
            it.step_by()
        it.step_by()
        alive = sum(it.learners.alive(n) for n in range(len(it.learners.processes)))
        assert alive == (3 if "fence" in name else 2), f"{name}\n{it.learners.everything()}"
        if alive < 3:
            it.start(MILLRACE_KILL_DIR=str(armed))
    rows = it.ledger()
    assert len({row["leader"] for row in rows[1:]}) > 3
    _, weights = reference(place, len(rows) - 1)
    assert drift(weights, it.weights()) < 5e-3


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_learner_is_missed_for_a_second(deploy: Callable[[int], Deployment], rank: int) -> None:
    it = deploy(0)
    it.together(3)
    it.step_by(2)
    ports = {n: it.learners.port(n) for n in range(3)}
    victim = next(n for n in range(3) if f":{ports[n]}-" in it.ledger()[-1]["ranks"][rank]["member"])
    it.learners.kill(victim)
    it.step_by(2)
    rows = it.ledger()
    assert rows[-1]["layout"] == "torch:d2"
    assert rows[-1]["generation"] > rows[2]["generation"]


def test_several_joiners_at_once_cost_one_regroup_and_get_shares(
    deploy: Callable[[int], Deployment], tmp_path: Path
) -> None:
    """Both come while a step is being trained: its learner is held there until they knock."""
    freezes = tmp_path / "freezes"
    freezes.mkdir()
    it = deploy(1)
    it.start(FREEZE_DIR=str(freezes))
    it.at_least(1)
    hold = freezes / "hold-learner.before_begin"
    hold.touch()
    it.feed(1)
    until(lambda: any(freezes.glob("held-*")), it.learners)
    it.start(2)
    until(lambda: len(it.bus.group(policy_names.group(it.settings)).members) == 3, it.learners)
    hold.unlink()
    until(lambda: all(("formed" in it.states(n)) for n in (1, 2)), it.learners)
    it.step_by(2)
    rows = it.ledger()
    assert len(rows[-1]["ranks"]) == 3
    assert all(share["tokens"] > 0 and share["groups"] > 0 for share in rows[-1]["ranks"])
    assert [it.states(n).count("formed") for n in range(3)] == [2, 1, 1], it.learners.everything()


@pytest.mark.parametrize("name", ["checkpoint.after_rename", "learner.before_begin", "learner.before_commit"])
def test_a_leader_frozen_before_its_commit_is_refused_when_it_wakes(
    deploy: Callable[[int], Deployment], tmp_path: Path, name: str
) -> None:
    """It sleeps with a finished step in hand, is replaced, and goes straight on to commit that step when it wakes.

    Two outcomes are lawful. Refused: the broker answers by the fence of the transactional id or of the generation. Not
    committed: the broker did not answer in time, so that the outcome was unknown; it fenced again and read in the log
    that another made the version. (A third, that the log could not be read either, needs a broker that is away.)"""
    freezes = tmp_path / "freezes"
    freezes.mkdir()
    it = deploy(0)
    it.together(2, FREEZE_DIR=str(freezes))
    it.step_by()
    (freezes / name).touch()
    it.step_by()
    (mark,) = freezes.glob("frozen-*")
    pid = int(mark.name.removeprefix("frozen-"))
    zombie = next(n for n in range(2) if it.learners.processes[n].pid == pid)
    it.step_by()
    before = it.ledger()
    assert f":{it.learners.port(zombie)}-" not in before[-1]["leader"]
    formed = it.states(zombie).count("formed")
    it.learners.signal(zombie, signal.SIGCONT)
    until(lambda: it.states(zombie).count("formed") > formed, it.learners)
    said = it.learners.output(zombie)
    refusal = re.search(r"the commit of version (\d+) was refused: |version (\d+) was not committed: ", said)
    assert refusal is not None, said
    number = int(refusal[1] or refusal[2])
    assert f":{it.learners.port(zombie)}-" not in it.ledger()[number]["leader"], "another made that version"
    it.step_by(2)
    rows = it.ledger()
    assert rows[: len(before)] == before
    assert len(rows[-1]["ranks"]) == 2


def test_changing_layouts_drift_by_rounding_alone(
    deploy: Callable[[int], Deployment], place: Callable[[], Place]
) -> None:
    _, weights = reference(place, 12)
    it = deploy(0)
    it.start()
    it.step_by(3)
    it.start(2)
    until(lambda: all("formed" in it.states(n) for n in (1, 2)), it.learners)
    it.step_by(3)
    it.learners.kill(0)
    it.step_by(3)
    it.learners.signal(1, signal.SIGTERM)
    assert it.learners.wait(1) == 0
    it.step_by(3)
    rows = it.ledger()
    assert {row["layout"] for row in rows[1:]} == {"torch:d1", "torch:d2", "torch:d3"}
    assert drift(weights, it.weights()) < 5e-4


def test_the_same_layout_twice_gives_identical_bytes(deploy: Callable[[int], Deployment]) -> None:
    chains = []
    for _ in range(2):
        it = deploy(0)
        it.together(2)
        it.feed(4)
        it.at_least(4)
        rows = it.ledger()
        assert {row["layout"] for row in rows[1:]} == {"torch:d2"}
        chains.append([row["digest"] for row in rows])
    assert chains[0] == chains[1]


def test_a_learner_that_differs_is_refused_by_name(deploy: Callable[[int], Deployment]) -> None:
    it = deploy(1)
    it.start()
    it.at_least(1)
    (other,) = it.start(MILLRACE_LEARNER__LR="0.001")
    assert it.learners.wait(other) != 0
    assert "differ from this one in configuration" in it.learners.output(other)
    it.step_by()
    assert it.states(0).count("formed") == 1


def test_more_learners_than_partitions_stand_by_and_take_over(deploy: Callable[[int], Deployment]) -> None:
    it = deploy(1)
    it.start(5)
    until(lambda: len(it.idle()) == 1, it.learners)  # the fifth is here: four may have begun before it
    (idle,) = it.idle()
    it.step_by()
    assert it.ledger()[-1]["layout"] == "torch:d4"
    formed = it.states(idle).count("formed")
    it.learners.kill(next(n for n in range(5) if n != idle))
    until(lambda: it.states(idle).count("formed") > formed, it.learners)  # three may have formed a group before it
    it.step_by(2)
    assert it.ledger()[-1]["layout"] == "torch:d4"


def test_garbage_at_every_port_keeps_no_group_from_forming(deploy: Callable[[int], Deployment]) -> None:
    it = deploy(0)
    it.together(3)
    it.step_by()
    with Garbage(it.listening):
        it.learners.kill(it.leader())
        it.step_by()
        (joiner,) = it.start()
        until(lambda: "formed" in it.states(joiner), it.learners)
        it.step_by(2)
    rows = it.ledger()
    assert rows[-1]["layout"] == "torch:d3"
    assert sum(it.learners.alive(n) for n in range(4)) == 3


def test_a_full_disk_ends_a_learner_that_says_so_and_loses_nothing(
    deploy: Callable[[int], Deployment], place: Callable[[], Place]
) -> None:
    digests, _ = reference(place, 3)
    it = deploy(1)
    (number,) = it.start()
    it.at_least(1)
    kept = sorted(policy_names.weights_root(it.settings).rglob("*"))
    it.fill_disk(number)
    it.feed(1)
    assert it.learners.wait(number, 180) == 1
    said = it.learners.output(number)
    assert "CheckpointError: version 2 cannot be written to" in said
    assert "make room there, or mend it, and start again; no version was lost" in said
    assert version(it.bus, it.settings) == 1
    assert sorted(policy_names.weights_root(it.settings).rglob("*")) == kept
    it.start()
    it.step_by()
    assert [row["digest"] for row in it.ledger()] == digests


def test_a_leader_whose_disk_is_full_leaves_the_others_to_go_on(deploy: Callable[[int], Deployment]) -> None:
    it = deploy(0)
    it.together(2)
    it.step_by()
    leader = it.leader()
    it.fill_disk(leader)
    it.step_by(2)
    assert it.learners.wait(leader, 180) == 1
    assert "version 2 cannot be written to" in it.learners.output(leader)
    rows = it.ledger()
    assert [row["layout"] for row in rows[1:]] == ["torch:d2", "torch:d1", "torch:d1"]
