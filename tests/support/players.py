"""Who is no stage in a history: the task loader, the rollout workers with their gateway and judge, production traffic,
and a learner that commits with the production code.

Each is called by the world's scheduler and does one small thing. While `Plan.healthy` is false they fail in every way
real ones do: attempts that die, are run twice, lose events or their rewards, answer late or with tokens older than was
allowed; learners that freeze in the middle of a commit and wake after their successor."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from millrace.consumers.learner.step.leader import commit_version
from millrace.consumers.learner.version.order import Batch, LearningOrder
from millrace.infra.errors import BusError
from millrace.infra.log.base import Member, MemberToken, Place, Transactor
from millrace.infra.log.history import ledger, newest
from millrace.infra.log.topics import full_name
from millrace.schemas import arrays, codec
from millrace.testing.events import Episode, stable_id
from millrace.testing.world import NAMESPACE, World, _Freeze

SECOND = 1_000_000
POLICY = "p"


@dataclass
class Plan:
    """One history's terms. `random` is the history's own source of chance."""

    random: random.Random
    batch: int
    eta: int
    size: int
    slots: int
    release: str
    share: float
    short: str
    dynamic_sampling: bool = False
    policy: str = POLICY
    healthy: bool = False
    prompting: bool = True
    tries: dict[str, int] = field(default_factory=dict)
    roots: set[str] = field(default_factory=set)
    """root trajectories of its attempts"""
    zombies: int = 0
    """learner commits of the dead that were refused"""

    def chance(self, probability: float) -> bool:
        return not self.healthy and self.random.random() < probability


def first_digest() -> str:
    return hashlib.sha256(b"version 0").hexdigest()


def next_digest(parent: str, batch: Any) -> str:
    """A deterministic trainer: the weights follow from the parent and from what the batch holds."""
    content = [(group["group"], group["tokens"], sorted(map(repr, group["rewards"]))) for group in batch]
    return hashlib.sha256(f"{parent}{content}".encode()).hexdigest()


def version_zero(plan: Plan) -> tuple[dict[str, Any], dict[str, Any]]:
    """(WeightVersion, LedgerEntry) of the beginning."""
    event = {"policy": plan.policy, "version": 0, "parent": None, "mode": "full", "uri": "", "digest": first_digest()}
    event |= {"files": {}, "tokenizer_hash": "", "template_hash": "", "seq_lo": 0, "seq_hi": 0, "time": 0}
    event |= {"batch": plan.batch, "eta": plan.eta, "shards": 2, "group_size": plan.size, "parent_policy": None}
    entry = _entry(plan.policy, 0, [], first_digest(), 0, 0) | {"layout": "", "eta": plan.eta}
    return event, ledger.chain_entry(entry, b"")  # type: ignore[arg-type]


def _entry(policy: str, version: int, groups: list[Any], digest: str, lo: int, hi: int) -> dict[str, Any]:
    entry = {"policy": policy, "version": version, "seq_lo": lo, "seq_hi": hi, "groups": groups, "ranks": []}
    entry |= {"layout": "test", "generation": 0, "leader": "", "unchanged": None, "masked_tokens": 0, "digest": digest}
    entry |= {"libraries": {}, "cpu": "", "config_hash": "", "code_hash": "", "metrics": {}, "eta": 0, "time": 0}
    return entry | {"prev_hash": b"", "hash": b""}


class Loader:
    """Keeps a few unresolved prompts ahead."""

    def __init__(self, plan: Plan, ahead: int = 6) -> None:
        self.plan, self.ahead, self.sent = plan, ahead, 0
        self.open: set[str] = set()

    def __call__(self, world: World) -> None:
        for record in world.new("loader", f"{self.plan.policy}.resolutions"):
            self.open.discard(codec.decode_as("Resolution", record.value or b"")["prompt_id"] or "")
        while self.plan.prompting and len(self.open) < self.ahead:
            prompt = {"id": f"task-{self.sent}", "policy": self.plan.policy, "number": self.sent, "task": "{}"}
            world.send(
                f"{self.plan.policy}.prompts",
                prompt["id"],
                "Prompt",
                prompt | {"group_size": None, "awaits": ["verifier"]},
            )
            self.open.add(prompt["id"])
            self.sent += 1
            if self.plan.chance(0.05):  # a loader that restarts may write its last prompt again
                world.send(
                    f"{self.plan.policy}.prompts", prompt["id"], "Prompt", prompt | {"group_size": None, "awaits": []}
                )


class Crew:
    """Rollout workers, gateway and judge: each call moves one attempt on by an event."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.committed = 0
        self.running: list[Iterator[None]] = []
        self.forgotten: list[tuple[dict[str, Any], int]] = []
        """samples whose worker died: whoever takes over runs them again, unless the lease ends first"""
        self.counter = 0

    def __call__(self, world: World) -> None:
        self._look(world)
        r = self.plan.random
        if self.forgotten and r.random() < (0.5 if self.plan.healthy else 0.1):
            self._start(world, *self.forgotten.pop(r.randrange(len(self.forgotten))))
        if self.plan.share and r.random() < 0.15 and len(self.running) < 12 and self.plan.prompting:
            self._start(world, None, 0)
        for _ in range(min(len(self.running), 16 if self.plan.healthy else 3)):
            run = r.choice(self.running)
            try:
                next(run)
            except StopIteration:
                self.running.remove(run)

    def _look(self, world: World) -> None:
        for record in world.new("crew", f"{self.plan.policy}.weights"):
            self.committed = codec.decode_as("WeightVersion", record.value or b"")["version"]
        for record in world.new("crew", f"{self.plan.policy}.grants"):
            grant = codec.decode_as("Grant", record.value or b"")
            for sample in grant["samples"]:
                if self.plan.chance(0.08):
                    self.forgotten.append((grant, sample))
                else:
                    self._start(world, grant, sample)
                    if self.plan.chance(0.1):
                        self._start(world, grant, sample)

    def _start(self, world: World, grant: dict[str, Any] | None, sample: int) -> None:
        self.counter += 1
        self.running.append(self._attempt(world, grant, sample, self.counter))

    def _attempt(self, world: World, grant: dict[str, Any] | None, sample: int, number: int) -> Iterator[None]:
        plan, r = self.plan, self.plan.random
        root = stable_id("root", plan.policy, number)
        plan.roots.add(root)
        common = {"policy": plan.policy, "attempt": f"a{number}", "wait_ms": 4_000}
        common |= {"source": f"{plan.policy}-gateway-{number % 2}"}
        if grant is None:
            low = self.committed
            episode = Episode(root, **common)
        else:
            low = grant["min_version"]
            terms = {"ticket": grant["ticket"], "size": grant["group_size"], "sample": sample}
            episode = Episode(root, **common, **terms, min_version=low, deadline=grant["deadline"])
        if low and plan.chance(0.03):
            low -= 1  # an engine that had not loaded what its grant asks for

        def send(event: dict[str, Any], times: int = 1) -> None:
            source = episode.source if event["source_seq"] is not None else ""
            for _ in range(times):
                world.send("raw", episode.key, "Event", event, source=source)

        send(episode.start())
        yield
        version, keep = low, 0
        for turn in range(r.randint(1, 2)):
            version = r.randint(version, max(version, self.committed))
            if plan.chance(0.02):
                episode.call("lost")  # written by the gateway, and lost with its disk
            send(episode.call(f"{root}-{turn}", keep=keep, version=version))
            keep += 5
            yield
            if plan.chance(0.04):
                return  # the worker died
        if plan.chance(0.05):
            send(episode.event("gap", {"missed": 1, "reason": "disk full"}))
        send(episode.end("failed" if plan.chance(0.06) else "completed"))
        yield
        for _ in range(r.randint(0, 3)):
            yield
        if plan.chance(0.06):
            return  # the judge never speaks
        value = None if plan.chance(0.05) else r.choice((0.0, 0.5, 1.0))
        send(episode.reward(value), 2 if plan.chance(0.1) else 1)
        if plan.chance(0.1):
            yield
            send(episode.reward(r.random(), n=1))


class Learner:
    """One learner process at a time, with every way to die in the middle of a commit."""

    life: type[Life]

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.zombies: list[_Freeze] = []
        self._digests: list[str] = [first_digest()]
        self._restart()

    def __call__(self, world: World) -> None:
        if self.zombies and (self.plan.healthy or self.plan.random.random() < 0.3):
            self.zombies.pop(self.plan.random.randrange(len(self.zombies))).wake()
        if self.plan.chance(0.08):
            freeze = _Freeze(lambda: self._step(world), self.plan.random.randint(1, 8))
            freeze.start()
            if not freeze.done:
                if self.plan.random.random() < 0.5:
                    freeze.wake(dead=True)
                else:
                    self.zombies.append(freeze)
                self._restart()
        else:
            self._step(world)

    def close(self) -> None:
        for zombie in self.zombies:
            zombie.wake(dead=True)

    def _restart(self) -> None:
        self._life = self.life(self.plan, getattr(self, "_life", None))

    def _step(self, world: World) -> None:
        life = self._life
        try:
            life.step(world)
        except BusError:
            if life is self._life:
                self._restart()
            else:
                self.plan.zombies += 1


class Life:
    """One incarnation: fence, read the ledger, train what is ready, commit."""

    def __init__(self, plan: Plan, former: Life | None) -> None:
        self.plan = plan
        self.former = former
        self.transactor: Transactor | None = None
        self.member: Member | None = None
        self.token: MemberToken | None = None
        self.number = former.number + 1 if former else 0
        self.order = LearningOrder(plan.batch, plan.eta, plan.release)
        self.head: newest.Head | None = None

    def step(self, world: World) -> None:
        weights, book = (full_name(NAMESPACE, f"{self.plan.policy}.{name}") for name in ("weights", "ledger"))
        if self.token is None:
            self._open(world)
        assert self.transactor is not None
        assert self.token is not None
        if self.head is None:
            self.head = newest.head(world.bus, weights, book)
            assert self.head is not None
            self.order.commit(self.head.seq_hi)
        for record in world.new(f"learner-{self.number}", f"{self.plan.policy}.resolutions"):
            self.order.fold(codec.decode_as("Resolution", record.value or b""))  # type: ignore[arg-type]
        batch = self.order.next(self.head.seq_hi)
        if batch is None:
            return
        masked = self._stale(world, batch) if self.order.masks_head(batch.seq_lo) else 0
        event, entry = self.records(world, batch, masked)
        offsets = {(full_name(NAMESPACE, f"{self.plan.policy}.trajectories"), 0): entry["seq_hi"]}
        commit_version(self.transactor, event, entry, offsets, self.token, weights_topic=weights, ledger_topic=book)
        self.head = newest.Head(event, entry)
        self.order.commit(entry["seq_hi"])

    def records(self, world: World, batch: Batch, masked: int) -> tuple[Any, Any]:
        """(WeightVersion, LedgerEntry) of the version that the batch makes."""
        assert self.head is not None
        return _records(self.head, batch, masked)

    def _stale(self, world: World, batch: Batch) -> int:
        """Trainable tokens that are too old for the batch: a learner leaves them out."""
        assert self.head is not None
        places = [Place(**place) for group in batch.groups for place in group["trajectories"]]
        stale = 0
        for record in world.bus.fetch(places):
            assert record is not None
            for lineage in codec.decode_as("Trajectory", record.value or b"")["lineages"]:
                trained = arrays.unpack(lineage["versions"])[arrays.unpack(lineage["mask"]) == 1]
                stale += int((self.head.version - trained > batch.eta).sum())
        return stale

    def _open(self, world: World) -> None:
        if self.former is not None and self.former.member is not None:
            self.former.member.close()
        self.former = None
        # Fenced before it asks where the group is: what a dead leader left in doubt must be settled first.
        self.transactor = world.bus.transactor(f"{NAMESPACE}.{self.plan.policy}.learn")
        self.member = world.bus.member(
            f"{NAMESPACE}.{self.plan.policy}.learn", full_name(NAMESPACE, f"{self.plan.policy}.trajectories")
        )
        self.member.poll(1, 0)
        self.token = self.member.token()


def _records(head: newest.Head, batch: Batch, masked: int) -> tuple[Any, Any]:
    groups = [
        {
            "seq": seq,
            "ticket": group["ticket"],
            "group": group["group"],
            "trajectories": group["trajectories"],
            "lost": None,
        }
        for seq, group in enumerate(batch.groups, batch.seq_lo)
    ]
    digest = next_digest(head.entry["digest"], batch.groups)
    entry = _entry(head.entry["policy"], head.version + 1, groups, digest, batch.seq_lo, batch.seq_hi) | {
        "eta": batch.eta,
        "masked_tokens": masked,
    }
    event = {**head.weights, "version": head.version + 1, "parent": head.version, "digest": digest}
    event |= {"seq_lo": batch.seq_lo, "seq_hi": batch.seq_hi}
    event |= dict.fromkeys(("batch", "eta", "shards", "group_size"))
    return event, ledger.chain_entry(entry, head.entry["hash"])  # type: ignore[arg-type]


Learner.life = Life
