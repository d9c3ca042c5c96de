"""The runs of `study_layouts`: one recorded topic, trained from version 0 again and again by other learners.

Invariants: trajectories and completions are written once and never again; a run begins without `weights`, `ledger`,
`resolutions` and the learners' group. It writes the recorded bytes of `resolutions` again, version by version: a batch
whose resolutions are held back is what holds learners at a boundary. Every run keeps its versions in its own directory.
"""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient
from tenacity import Retrying, retry_if_exception_type, retry_if_result, stop_after_delay, wait_fixed

from millrace.apps.demo import tiny
from millrace.consumers import policy_names, version_zero
from millrace.infra.config import Settings, load
from millrace.infra.log.base import Outgoing, Record
from millrace.infra.log.kafka.bus import KafkaBus
from millrace.trainers.weights import checkpoint
from tests.support.feed import feed
from tests.support.learners import Learners, entries, until, version

SHARDS, BATCH, SIZE = 4, 8, 4
AHEAD = 2
"""batches released beyond the newest version while learners come or go, so that the others never wait for one"""
WAIT_S = 300.0
AGAIN = ("weights", "ledger", "resolutions")
SETTINGS = """\
namespace = "{namespace}"
home = "{home}"
[kafka]
bootstrap = "{bootstrap}"
[topics]
shards = {shards}
[policy]
name = "pico"
batch = {batch}
group_size = {size}
eta = 2
[learner]
keep = 100000
session_timeout_s = 10
collective_timeout_s = 120
"""

Layout = Sequence[tuple[int, int]]
"""(version, learners): from this version on so many train; the first begins at 0."""


@dataclass(frozen=True, slots=True)
class Recording:
    """What all runs train on. resolutions: of each version, its records; model: the directory of version 0."""

    folder: Path
    bootstrap: str
    namespace: str
    model: Path
    resolutions: Sequence[Sequence[Record]]

    def settings(self, name: str) -> tuple[Settings, Path]:
        """The settings of a run, and the file that holds them."""
        return _settings(self.folder / name, self.bootstrap, self.namespace)

    def digest(self) -> str:
        """sha256 hex over every record of `trajectories` and where it lies."""
        settings, _ = self.settings("recording")
        topic = policy_names.topics(settings)["trajectories"]
        sums = hashlib.sha256()
        bus = KafkaBus(self.bootstrap)
        for partition in range(SHARDS):
            for record in bus.read(topic, partition):
                sums.update(f"{partition}@{record.offset}:".encode() + hashlib.sha256(record.value or b"").digest())
        bus.close()
        return sums.hexdigest()


@dataclass(frozen=True, slots=True)
class Join:
    """A learner that came while others trained. mark: part of its member id; asked, agreed: when it subscribed, and
    when it saw a settled table with itself in it (seconds since the epoch)."""

    mark: str
    asked: float
    agreed: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run left. rows: the ledger; file: its settings."""

    name: str
    layout: Layout
    rows: Sequence[Mapping[str, Any]]
    joins: Sequence[Join]
    root: Path
    file: Path

    def directory(self, number: int) -> Path:
        """Of a version."""
        return self.root / f"v{number}-{self.rows[number]['digest'][:12]}"


def record(folder: Path, bootstrap: str, namespace: str, versions: int) -> Recording:
    """Write `versions` batches of ready groups, and keep their resolutions."""
    settings, _ = _settings(folder / "recording", bootstrap, namespace)
    model = folder / "model"
    checkpoint.export(model, tiny.random_state(0))
    bus = KafkaBus(bootstrap)
    bus.ensure_topics(settings.layout.specs())
    for number in range(versions):
        feed(bus, settings, range(BATCH * number, BATCH * (number + 1)), version=number)
    found = list(bus.read(policy_names.topics(settings)["resolutions"], 0))
    bus.close()
    assert len(found) == BATCH * versions
    batches = [found[BATCH * number : BATCH * (number + 1)] for number in range(versions)]
    return Recording(folder, bootstrap, namespace, model, batches)


def train(recording: Recording, name: str, layout: Layout) -> Outcome:
    """Train every recorded batch from version 0 with the learners of `layout`; leaves no process."""
    settings, file = recording.settings(name)
    _forget(recording.bootstrap, settings)
    bus = KafkaBus(recording.bootstrap)
    bus.ensure_topics(settings.layout.specs())
    version_zero.create(settings, recording.model, bus)
    with Learners(file.parent, file) as learners:
        run = _Run(recording, settings, bus, learners)
        for (_, count), (end, _) in pairwise([*layout, (len(recording.resolutions), 0)]):
            run.resize(count, end)
            run.advance(end)
        for number in run.alive:
            learners.signal(number, signal.SIGTERM)
        codes = [learners.wait(number, WAIT_S) for number in run.alive]
        assert not any(codes), learners.everything()
        rows = entries(bus, settings)
    bus.close()
    return Outcome(name, layout, rows, run.joins, policy_names.weights_root(settings), file)


@dataclass(slots=True)
class _Run:
    """The learners of one run, and how many batches were released to them."""

    recording: Recording
    settings: Settings
    bus: KafkaBus
    learners: Learners
    released: int = 0
    alive: list[int] = field(default_factory=list)
    joins: list[Join] = field(default_factory=list)

    def resize(self, count: int, end: int) -> None:
        """Have `count` learners. While one comes or goes the others train on, up to before version `end`."""
        if not self.alive:
            self.alive = [self.learners.start() for _ in range(count)]
            until(lambda: self._together() == count, self.learners, WAIT_S)
            return
        while len(self.alive) < count:
            self.alive.append(number := self.learners.start())
            until(lambda number=number: self._at(number, "port") is not None, self.learners, WAIT_S)
            self._meanwhile(lambda number=number: self._at(number, "loaded") is not None, end)
            asked, agreed = self._at(number, "joined"), self._at(number, "agreed")
            assert asked is not None
            assert agreed is not None
            self.joins.append(Join(f":{self.learners.port(number)}-", asked, agreed))
        while len(self.alive) > count:
            number = self.alive.pop(0)
            self.learners.signal(number, signal.SIGTERM)
            self._meanwhile(lambda number=number: not self.learners.alive(number), end)
            assert self.learners.wait(number) == 0, self.learners.output(number)

    def advance(self, end: int) -> None:
        """Release everything up to version `end`, and wait for it."""
        self._release(end - self.released)
        until(lambda: version(self.bus, self.settings) >= end, self.learners, WAIT_S)

    def _meanwhile(self, done: Callable[[], bool], end: int) -> None:
        """Release batches until `done`, all but the last: who joins slowly has a share of that one."""

        def step() -> bool:
            if self.released < min(end - 1, version(self.bus, self.settings) + AHEAD):
                self._release(1)
            return done()

        until(step, self.learners, WAIT_S)

    def _release(self, count: int) -> None:
        topic = policy_names.topics(self.settings)["resolutions"]
        with self.bus.transactor(f"{self.settings.namespace}.release") as transactor:
            transactor.begin()
            for batch in self.recording.resolutions[self.released : self.released + count]:
                for one in batch:
                    transactor.send(Outgoing(topic, one.key, one.value, one.headers))
            transactor.commit({}, None)
        self.released += count

    def _together(self) -> int:
        view = self.bus.group(policy_names.group(self.settings))
        return sum(bool(member.partitions) for member in view.members) if view.stable else 0

    def _at(self, number: int, state: str) -> float | None:
        """When a learner's state machine first passed a state."""
        return next((at for at, name in self.learners.times(number) if name.split()[0] == state), None)


def _settings(folder: Path, bootstrap: str, namespace: str) -> tuple[Settings, Path]:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "millrace.toml"
    places = {"home": folder / "home", "bootstrap": bootstrap, "namespace": namespace}
    file.write_text(SETTINGS.format(**places, shards=SHARDS, batch=BATCH, size=SIZE))
    return load(file, {}), file


def _forget(bootstrap: str, settings: Settings) -> None:
    """Delete what a run before has written, and the group with its offsets."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    again = Retrying(
        stop=stop_after_delay(60),
        wait=wait_fixed(0.2),
        retry=retry_if_result(lambda gone: not gone) | retry_if_exception_type(KafkaException),
        reraise=True,
    )
    group = policy_names.group(settings)
    for name in [policy_names.topics(settings)[name] for name in AGAIN]:
        again(_gone, lambda name=name: admin.delete_topics([name])[name])
    again(_gone, lambda: admin.delete_consumer_groups([group])[group])


def _gone(delete: Callable[[], Future[None]]) -> bool:
    """Delete something; whether it was not there any more."""
    try:
        delete().result()
    except KafkaException as error:
        if error.args[0].code() not in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.GROUP_ID_NOT_FOUND):
            raise
        return True
    return False
