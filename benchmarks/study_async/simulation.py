"""The loop in virtual time: dispatch's production order, service times as data.

    commit -> dispatch grants -> engines sample -> the group is complete -> dispatch gives it a seq -> learners train

Invariants: who may start and what is learned when is decided by production code alone (`Dispatch`, `LearningOrder`,
the manifest's `plan`); engines are chosen as the gateway does, the least loaded first; a reply that runs while weights
change goes on under the new ones; equal inputs give equal histories."""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Protocol

from benchmarks.study_async.desk import Desk
from millrace.consumers.learner.version.order import Batch, LearningOrder
from millrace.infra.stages.base import Emit
from millrace.trainers.batches.allocation import ReadyGroup, plan


@dataclass(frozen=True, slots=True)
class Policy:
    """B, eta and group size, and how groups are released."""

    batch: int
    eta: int
    group_size: int = 1
    release: str = "reserve"


@dataclass(frozen=True, slots=True)
class Engines:
    """`count` engines, each with at most `concurrency` replies at once. With c of them, each gets a token every
    token_s + c * crowd_s seconds; while weights change nothing is sampled for load_s seconds."""

    count: int
    concurrency: int
    token_s: float
    crowd_s: float = 0.0
    load_s: float = 0.0

    def rate(self, replies: float) -> float:
        """Tokens a second that each of so many replies gets."""
        return 1 / (self.token_s + replies * self.crowd_s)


@dataclass(frozen=True, slots=True)
class Learners:
    """`count` ranks. A minibatch takes what its slowest rank takes, token_s for each token, and reduce_s when there are
    several; a version takes fixed_s beside them (fetch, checkpoint, commit)."""

    count: int
    token_s: float
    reduce_s: float = 0.0
    fixed_s: float = 0.0
    minibatches: int = 1

    def seconds(self, version: int, groups: Sequence[ReadyGroup]) -> float:
        """What the step from `version` takes, with the groups dealt to ranks as the manifest does."""
        tokens = {group.seq: group.tokens for group in groups}
        shares = plan(groups, self.count, self.minibatches)
        slowest = sum(max(sum(tokens[seq] for seq in share) for share in minibatch) for minibatch in shares)
        return self.fixed_s + slowest * self.token_s + (len(shares) * self.reduce_s if self.count > 1 else 0.0)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of replies: lognormal with this mean (before the cut) and sigma of the logarithm, cut at `most`."""

    mean: float
    sigma: float
    most: float = math.inf
    seed: int = 0

    def __call__(self, ticket: int, sample: int) -> float:
        """The length of one reply: the same in every run, whatever the policy is."""
        normal = random.Random(f"{self.seed}/{ticket}/{sample}").gauss(0, 1)
        return max(1.0, min(self.most, self.mean * math.exp(self.sigma * normal - self.sigma**2 / 2)))


@dataclass(frozen=True, slots=True)
class Delays:
    """Seconds between two roles. grant_s and resolve_s are dispatch's own time for a grant and for a completion, one
    after the other; start_s from a grant to its first token, seal_s from a group's last token to its completion,
    commit_s from a commit to dispatch."""

    grant_s: float = 0.0
    resolve_s: float = 0.0
    start_s: float = 0.0
    seal_s: float = 0.0
    commit_s: float = 0.0


class Step(Protocol):
    """What a training step takes, in seconds."""

    def __call__(self, version: int, groups: Sequence[ReadyGroup]) -> float: ...


@dataclass(slots=True)
class Trained:
    """What became a version: from when to when it was trained, and the oldest version of its tokens' engines."""

    begin: float
    end: float
    oldest: int
    tokens: int


@dataclass(slots=True)
class _Group:
    size: int
    tokens: list[int] = field(default_factory=list)
    head: int = 1 << 60


class _Engine:
    """Replies that share one engine: each is at `served` tokens more than when it came."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.running: list[tuple[float, int, int, int, float]] = []
        """(tokens served when it ends, order, ticket, version of its first token, tokens), the next to end first"""
        self.served = 0.0
        self.at = 0.0
        self.paused_until = 0.0
        self.stamp = 0


class Simulation:
    """One run. Raises RuntimeError when nothing can happen any more before the last version."""

    def __init__(
        self,
        policy: Policy,
        engines: Engines,
        reply: Callable[[int, int], float],
        step: Step,
        delays: Delays | None = None,
        prompts: int | None = None,
    ) -> None:
        """reply(ticket, sample) is the tokens that it takes; without `prompts` there are always enough."""
        self._policy, self._engines, self._reply, self._step = policy, engines, reply, step
        self._delays = delays or Delays()
        self._prompts = prompts
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self.now = 0.0
        self._fleet = [_Engine(number) for number in range(engines.count)]
        self._by_load = [(0, number) for number in range(engines.count)]
        self._line: deque[tuple[int, float]] = deque()
        """(ticket, tokens) of samples that no engine has room for"""
        self._groups: dict[int, _Group] = {}
        self._learning = LearningOrder(policy.batch, policy.eta, policy.release)
        self._heads: dict[int, int] = {}
        self._version = 0
        self._seq_hi = 0
        self._is_training = False
        self._dispatch_until = 0.0
        self.versions: list[Trained] = []

    def run(self, versions: int) -> list[Trained]:
        """Simulate until so many versions are committed."""
        p = self._policy
        prompts = self._prompts if self._prompts is not None else (versions + p.eta + 1) * p.batch
        self._desk = Desk(p.batch, p.eta, p.group_size, p.release, prompts)
        self._dispatch(self._desk.pass_time(0.0), 0.0)
        while len(self.versions) < versions:
            if not self._events:
                raise RuntimeError(f"at rest at {self.now:.1f} s with {len(self.versions)} versions")
            self.now, _, act = heapq.heappop(self._events)
            act()
        return self.versions

    def _at(self, time: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), act))

    # -- dispatch

    def _dispatch(self, emits: Sequence[Emit], seconds: float) -> None:
        """What it emitted reaches the others once it had the time for that."""
        grants = [emit.record for emit in emits if emit.name == "Grant"]
        begin = max(self.now, self._dispatch_until)
        self._dispatch_until = begin + seconds + len(grants) * self._delays.grant_s
        for emit in emits:
            if emit.name == "Resolution":
                self._at(begin + seconds, partial(self._resolve, emit.record))
        for number, grant in enumerate(grants, 1):
            time = begin + seconds + number * self._delays.grant_s + self._delays.start_s
            self._at(time, partial(self._start, grant))

    def _resolve(self, resolution: Any) -> None:
        self._learning.fold(resolution)
        if resolution["kind"] == "ready":
            self._heads[resolution["seq"]] = resolution["v_head"]
        self._train()

    # -- engines

    def _start(self, grant: Any) -> None:
        ticket = grant["ticket"]
        self._groups[ticket] = _Group(grant["group_size"])
        for sample in grant["samples"]:
            self._line.append((ticket, self._reply(ticket, sample)))
        self._fill()

    def _fill(self) -> None:
        """Give samples in line to the least loaded engines that have room."""
        touched = {}
        while self._line and self._by_load:
            load, number = self._by_load[0]
            engine = self._fleet[number]
            if load != len(engine.running):
                heapq.heappop(self._by_load)
            elif load >= self._engines.concurrency:
                break
            else:
                ticket, tokens = self._line.popleft()
                self._serve(engine)
                end = engine.served + tokens
                heapq.heappush(engine.running, (end, next(self._order), ticket, self._version, tokens))
                heapq.heapreplace(self._by_load, (len(engine.running), number))
                touched[number] = engine
        for engine in touched.values():
            self._schedule(engine)

    def _serve(self, engine: _Engine) -> None:
        """Bring it to the present."""
        begin = max(engine.at, engine.paused_until)
        if self.now > begin:
            engine.served += (self.now - begin) * self._engines.rate(len(engine.running))
        engine.at = max(self.now, engine.at)

    def _schedule(self, engine: _Engine) -> None:
        """Say when its next reply ends, as things stand."""
        engine.stamp += 1
        if engine.running:
            rest = (engine.running[0][0] - engine.served) / self._engines.rate(len(engine.running))
            time = max(self.now, engine.paused_until) + max(0.0, rest)
            self._at(time, partial(self._end, engine, engine.stamp))

    def _end(self, engine: _Engine, stamp: int) -> None:
        if stamp != engine.stamp:
            return
        self._serve(engine)
        engine.served, _, ticket, head, tokens = heapq.heappop(engine.running)
        heapq.heappush(self._by_load, (len(engine.running), engine.number))
        group = self._groups[ticket]
        group.tokens.append(round(tokens))
        group.head = min(group.head, head)
        if len(group.tokens) == group.size:
            del self._groups[ticket]
            self._at(self.now + self._delays.seal_s, partial(self._complete, ticket, group, self._version))
        self._fill()
        self._schedule(engine)

    def _complete(self, ticket: int, group: _Group, tail: int) -> None:
        emits = self._desk.complete(ticket, group.tokens, group.head, tail, self.now)
        self._dispatch(emits, self._delays.resolve_s)

    # -- learners

    def _train(self) -> None:
        """Begin the next step, when its batch is whole and the learners are free."""
        batch = None if self._is_training else self._learning.next(self._seq_hi)
        if batch is None:
            return
        self._is_training = True
        groups = [ReadyGroup(seq, sum(one["tokens"])) for seq, one in enumerate(batch.groups, batch.seq_lo)]
        oldest = min(self._heads.pop(group.seq) for group in groups)
        end = self.now + self._step(self._version, groups)
        step = Trained(self.now, end, oldest, sum(group.tokens for group in groups))
        self._at(end, partial(self._commit, batch, step))

    def _commit(self, batch: Batch, step: Trained) -> None:
        self.versions.append(step)
        self._version, self._seq_hi, self._is_training = self._version + 1, batch.seq_hi, False
        self._learning.commit(batch.seq_hi)
        if self._engines.load_s:
            for engine in self._fleet:
                self._serve(engine)
                engine.paused_until = self.now + self._engines.load_s
                self._schedule(engine)
        self._at(self.now + self._delays.commit_s, partial(self._tell, self._version, self._seq_hi))
        self._train()

    def _tell(self, version: int, seq_hi: int) -> None:
        self._dispatch(self._desk.commit(version, seq_hi), 0.0)


def period(versions: Sequence[Trained], warm: int) -> float:
    """Mean seconds between two versions, the first `warm` left out."""
    return (versions[-1].end - versions[warm - 1].end) / (len(versions) - warm)


def staleness(versions: Sequence[Trained]) -> int:
    """The oldest token that was trained, in versions."""
    return max(number - step.oldest for number, step in enumerate(versions))
