"""A whole deployment in one thread: production runners over the in-memory bus, under a seeded scheduler.

    with World(seed, {"raw": 2, "events": 2}, [lambda: Refine(...), lambda: Seal(...)], workers=2) as world:
        for n in range(200):
            world.send("raw", "tenant/g1", "Event", event, source="gateway-0")   # numbered: may be sent twice
            world.chaos(3)                          # three random actions: steps, time, crashes, zombies, ...
        world.drain()                               # no more faults; until every stage has folded everything
        assert world.decoded("events") == ...
        world.verify()                              # every turn of every slot folds again to what it wrote

What the scheduler does, each with a chance of `Chances`: steps a random process; lets virtual time pass (`world.now`,
the clock of clock stages); freezes a process at a random point of `millrace.infra.faults` in the middle of a
step, after which it is dead for good (crash) or wakes much later (zombie), its slots taken over in between or not;
starts, stops and replaces processes; sends numbered records again; writes aborted transactions, so that offsets have
holes; runs actors.

Invariants: one thread runs at a time, so a seed gives one history, to the byte; stage factories are called once per
process; everything else (topics of the runner, group membership, restore) is what production does. `actors` are called
by the scheduler with the world and play what is no stage (learner, rollout workers); they should read with `world.new`.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from millrace.infra import faults
from millrace.infra.log.base import Outgoing, Place, Record
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.memory.bus import MemoryBus
from millrace.infra.log.topics import changelog_of, full_name, turns_of
from millrace.infra.stages.base import Stage
from millrace.infra.stages.live import StageRunner
from millrace.infra.stages.replay import verify
from millrace.infra.stages.slot import RunnerSettings
from millrace.infra.stages.state import SlotState
from millrace.schemas import codec

NAMESPACE = "w"
START = 1_700_000_000_000_000
"""micros at which virtual time begins"""


@dataclass(frozen=True)
class Chances:
    """Relative weights of the scheduler's actions; 0 rules one out."""

    step: float = 20
    tick: float = 2
    actor: float = 8
    crash: float = 0.5
    zombie: float = 0.5
    wake: float = 1
    expire: float = 2
    scale: float = 0.2
    resend: float = 0.5
    hole: float = 0.5


CALM = Chances(crash=0, zombie=0, expire=0, scale=0, resend=0, hole=0)


class _Unwind(SystemExit):
    """Ends the thread of a process that died."""


class _Freeze:
    """One step in a thread of its own that stops at the nth point it passes."""

    def __init__(self, step: Callable[[], object], nth: int) -> None:
        self.point = ""
        self.error: BaseException | None = None
        self._left = nth
        self._turn = threading.Semaphore(0)
        self._stopped = threading.Semaphore(0)
        self._dead = False
        self._step = step
        self.done = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Run until the point or the end of the step."""
        self._thread.start()
        _frozen[self._thread.ident or 0] = self
        self._turn.release()
        self._wait()

    def wake(self, *, dead: bool = False) -> None:
        """Run on from the point to the end of the step; `dead` unwinds instead."""
        self._dead = dead
        self._turn.release()
        self._wait()

    def pass_point(self, name: str) -> None:
        """Called in the thread at every point."""
        self._left -= 1
        if self._left == 0:
            self.point = name
            self._stopped.release()
            self._turn.acquire()
            if self._dead:
                raise _Unwind

    def _wait(self) -> None:
        self._stopped.acquire()
        if self.done:
            self._thread.join()
            _frozen.pop(self._thread.ident or 0, None)
            if self.error is not None:
                raise self.error

    def _run(self) -> None:
        self._turn.acquire()
        try:
            self._step()
        except _Unwind:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.done = True
            self._stopped.release()


_frozen: dict[int, _Freeze] = {}


def _at_point(name: str) -> None:
    freeze = _frozen.get(threading.get_ident())
    if freeze is not None:
        freeze.pass_point(name)


class Process:
    """One process of one stage: running, frozen in the middle of a step, or waiting to be noticed as gone."""

    def __init__(self, world: World, make: Callable[[], Stage], name: str) -> None:
        self._world, self.make, self.name = world, make, name
        self.stage = make()
        self.runner = StageRunner(world.bus, self.stage, world.settings, client_id=name, backoff_s=0)
        self.frozen: _Freeze | None = None

    @property
    def group(self) -> str:
        return f"{NAMESPACE}.{self.stage.name}"

    def expire(self) -> None:
        """Its session ends: the group forgets it, and others take its slots."""
        for row in self._world.bus.group(self.group).members:
            if row.client_id == self.name:
                self._world.bus.expel(self.group, row.member_id)


class World:
    """The deployment. Logical topic names everywhere; `bus` is there for everything else."""

    def __init__(
        self,
        seed: int | random.Random,
        topics: Mapping[str, int],
        stages: Sequence[Callable[[], Stage]],
        *,
        workers: int = 2,
        chances: Chances | None = None,
        actors: Iterable[Callable[[World], object]] = (),
        fencing: bool = True,
        skip_duplicates: bool = True,
        strict: bool = False,
        turn_records: int = 5,
        isolate: bool = False,
        claims: ClaimStore | None = None,
    ) -> None:
        """`topics` are partition counts; those of the runner are added. `workers` processes are started per stage.

        `fencing=False` and `skip_duplicates=False` are mutations: a property must fail. `strict` finds stages that
        mutate what they read. Small turns make more of them. `isolate=False`: what a stage raises is
        raised here, since no stage should raise anything."""
        self.random = seed if isinstance(seed, random.Random) else random.Random(seed)
        self.chances = chances or Chances()
        self.now = START
        instances = [make() for make in stages]
        counts = {full_name(NAMESPACE, name): count for name, count in topics.items()}
        for stage in instances:
            for name in (changelog_of(stage.name), turns_of(stage.name)):
                counts[full_name(NAMESPACE, name)] = topics[stage.primary]
        self.bus = MemoryBus(counts, fencing=fencing, clock=lambda: self.now, max_bytes=1 << 40)
        self.settings = RunnerSettings(
            NAMESPACE,
            clock=lambda: self.now,
            turn_records=turn_records,
            skip_duplicates=skip_duplicates,
            strict=strict,
            isolate=isolate,
            claims=claims,
        )
        self._publisher = self.bus.publisher()
        self._instances = {stage.name: stage for stage in instances}
        self._makes = {stage.name: make for stage, make in zip(instances, stages, strict=True)}
        self._slots = {stage.name: topics[stage.primary] for stage in instances}
        self._topics = list(topics)
        self._sent: dict[str, list[Outgoing]] = {}
        self._seen: dict[str, dict[int, int]] = {}
        self._started = 0
        self.actors = list(actors)
        self.processes: list[Process] = []
        self.frozen: list[tuple[Process, bool]] = []
        """processes stopped in the middle of a step, and whether they wake again"""
        self._ghosts: list[Process] = []
        """dead processes that their group still counts"""
        self.log: list[str] = []
        """what the scheduler did, for a failure's message"""
        self._hook = faults.install(_at_point)
        for make in stages:
            for _ in range(workers):
                self._start(make)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Unwind every frozen thread and disarm the points."""
        for process, _ in self.frozen:
            if process.frozen is not None:
                process.frozen.wake(dead=True)
        self.frozen.clear()
        faults.install(self._hook)

    # -- what tests put in

    def send(
        self,
        topic: str,
        key: str,
        name: str,
        record: Mapping[str, object] | bytes,
        *,
        source: str = "",
        headers: Mapping[str, str] | None = None,
        partition: int | None = None,
    ) -> Place:
        """Publish a record, encoded as `name` unless it is bytes. With a source it is numbered and may be resent."""
        value = record if isinstance(record, bytes) else codec.encode_by_name(name, record)
        head = {k: v.encode() for k, v in (headers or {}).items()}
        if source:
            outgoing = self._sent.setdefault(source, [])
            head |= {"source": source.encode(), "source-seq": b"%d" % len(outgoing)}
        out = Outgoing(full_name(NAMESPACE, topic), key.encode(), value, head, partition)
        if source:
            outgoing.append(out)
        return self._publisher.publish(out).result()

    def advance(self, micros: int) -> None:
        """Let virtual time pass."""
        self.now += micros

    # -- what tests take out

    def records(self, topic: str) -> list[Record]:
        """Every committed record of a topic: by partition, then by offset."""
        full_topic = full_name(NAMESPACE, topic)
        return [record for p in range(self.bus.partitions(full_topic)) for record in self.bus.read(full_topic, p)]

    def decoded(self, topic: str) -> list[dict[str, Any]]:
        """Every committed record of a topic, decoded."""
        return [codec.decode(record.value)[1] for record in self.records(topic) if record.value is not None]

    def new(self, reader: str, topic: str) -> list[Record]:
        """What a named reader has not seen yet of a topic; reading it moves the reader on."""
        full = full_name(NAMESPACE, topic)
        at = self._seen.setdefault(f"{reader} {topic}", {})
        found: list[Record] = []
        for partition, end in self.bus.ends(full).items():
            if end > at.get(partition, 0):
                found += self.bus.read(full, partition, at.get(partition, 0), end)
                at[partition] = end
        return found

    def state(self, stage: str, slot: int) -> SlotState:
        """A slot's state as its changelog tells it."""
        changelog = self.bus.read(full_name(NAMESPACE, changelog_of(stage)), slot)
        return SlotState.restore(slot, changelog, claims=self.settings.claims)

    def verify(self) -> int:
        """Fold every turn of every slot again, after `drain`; returns the number of turns. Raises ReplayError."""
        return sum(
            verify(self.bus, stage, NAMESPACE, slot, self.settings.claims)
            for stage in self._instances.values()
            for slot in range(self._slots[stage.name])
        )

    # -- the scheduler

    def chaos(self, actions: int) -> None:
        """Do that many random actions."""
        kinds = [kind for kind in vars(self.chances) if vars(self.chances)[kind]]
        weights = [vars(self.chances)[kind] for kind in kinds]
        for kind in self.random.choices(kinds, weights, k=actions):
            getattr(self, f"_do_{kind}")()

    def drain(self, rounds: int = 10_000) -> None:
        """Without further faults: everyone wakes, the dead are noticed and replaced, and all steps until nothing moves.

        Time stands still meanwhile and actors rest; call `advance` and `drain` again for what waits for time."""
        while self.frozen:
            self._do_wake()
        self._expire_all()
        for name in self._makes:
            self._start_missing(name)
        quiet_rounds = 0
        for _ in range(rounds):
            before = self._ends()
            record_count = sum(process.runner.step(0) for process in self.processes)
            quiet_rounds = quiet_rounds + 1 if not record_count and before == self._ends() and self._all_open() else 0
            if quiet_rounds == 2:
                return
        raise AssertionError(f"not at rest after {rounds} rounds; the scheduler did: {self.log[-50:]}")

    def settle(self, rounds: int = 1_000, micros: int = 0) -> None:
        """`drain` with the actors running and `micros` passing each round, until neither stages nor actors write."""
        for _ in range(rounds):
            before = self._ends()
            for actor in self.actors:
                actor(self)
            self.now += micros
            self.drain()
            if before == self._ends():
                return
        raise AssertionError(f"the actors still write after {rounds} rounds; the scheduler did: {self.log[-50:]}")

    def _ends(self) -> int:
        return sum(len(log.entries) for logs in self.bus.logs.values() for log in logs)

    def _all_open(self) -> bool:
        slot_counts: dict[str, int] = {}
        for process in self.processes:
            slot_counts[process.stage.name] = slot_counts.get(process.stage.name, 0) + len(process.runner.slots)
        return slot_counts == self._slots

    def _start(self, make: Callable[[], Stage]) -> None:
        self._started += 1
        self.processes.append(Process(self, make, f"p{self._started}"))

    def _start_missing(self, name: str) -> None:
        if not any(process.stage.name == name for process in self.processes):
            self._start(self._makes[name])

    def _expire_all(self) -> None:
        for ghost in self._ghosts:
            ghost.expire()
        self._ghosts.clear()

    def _do_step(self) -> None:
        if self.processes:
            self.random.choice(self.processes).runner.step(0)

    def _do_tick(self) -> None:
        self.now += self.random.choice((1, 1_000, 300_000, 1_000_000, 2_500_000))

    def _do_actor(self) -> None:
        if self.actors:
            self.random.choice(self.actors)(self)

    def _do_crash(self) -> None:
        self._freeze(wakes=False)

    def _do_zombie(self) -> None:
        self._freeze(wakes=True)

    def _freeze(self, *, wakes: bool) -> None:
        if not self.processes:
            return
        process = self.random.choice(self.processes)
        freeze = _Freeze(lambda: process.runner.step(0), self.random.randint(1, 14))
        freeze.start()
        if freeze.done:
            return
        self.log.append(f"{process.name} of {process.stage.name} {'freezes' if wakes else 'dies'} at {freeze.point}")
        process.frozen = freeze
        self.processes.remove(process)
        self.frozen.append((process, wakes))
        self._ghosts.append(process)
        if self.random.random() < 0.7:
            self._start(process.make)

    def _do_wake(self) -> None:
        if not self.frozen:
            return
        process, wakes = self.frozen.pop(self.random.randrange(len(self.frozen)))
        assert process.frozen is not None
        if not wakes:
            process.frozen.wake(dead=True)
            self._start_missing(process.stage.name)
            return
        self.log.append(f"{process.name} wakes")
        if process in self._ghosts:
            self._ghosts.remove(process)
        process.frozen.wake()
        process.frozen = None
        self.processes.append(process)

    def _do_expire(self) -> None:
        if self._ghosts:
            ghost = self._ghosts.pop(self.random.randrange(len(self._ghosts)))
            self.log.append(f"{ghost.name} expires")
            ghost.expire()

    def _do_scale(self) -> None:
        if not self.processes:
            return
        process = self.random.choice(self.processes)
        peers = sum(p.stage.name == process.stage.name for p in self.processes)
        if peers > 1 and self.random.random() < 0.5:
            self.log.append(f"{process.name} leaves")
            self.processes.remove(process)
            process.runner.close()
        elif peers < 4:
            self._start(process.make)

    def _do_resend(self) -> None:
        if not self._sent:
            return
        outgoing = self._sent[self.random.choice(sorted(self._sent))]
        first = self.random.randrange(max(0, len(outgoing) - 8), len(outgoing))
        self.log.append(f"numbers {first} to {len(outgoing) - 1} are sent again")
        for out in outgoing[first:]:
            self._publisher.publish(out).result()

    def _do_hole(self) -> None:
        topic = full_name(NAMESPACE, self.random.choice(self._topics))
        transactor = self.bus.transactor(f"hole-{topic}")
        transactor.begin()
        for partition in range(self.bus.partitions(topic)):
            transactor.send(Outgoing(topic, b"", b"aborted", partition=partition))
        transactor.close()
