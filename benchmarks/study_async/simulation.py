"""The loop in virtual time: dispatch's production order, service times as data.

    commit -> dispatch grants -> engines sample -> the group is complete -> dispatch gives it a seq -> learners train

Invariants: who may start and what is learned when is decided by production code alone (`Dispatch` in its fold, from
encoded records; `LearningOrder`; the manifest's `plan`); engines are chosen as the gateway does, the least loaded
first; a reply that runs while weights change goes on under the new ones; equal inputs give equal histories."""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from benchmarks.study_async import records
from millrace.consumers.learner.version.order import Batch, LearningOrder
from millrace.infra.stages.base import Emit
from millrace.trainers.batches.allocation import ReadyGroup, plan
from tests.support.folding import Bench

Step = Callable[[int, Sequence[ReadyGroup]], float]
"""seconds of a training step, from the version before it and its groups"""


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


@dataclass(frozen=True, slots=True)
class Learners:
    """`count` ranks. A minibatch takes what its slowest rank takes, token_s for each token, and reduce_s when there are
    several; a version takes fixed_s beside them (fetch, checkpoint, commit)."""

    count: int = 1
    token_s: float = 0.0
    reduce_s: float = 0.0
    fixed_s: float = 0.0
    minibatches: int = 1

    def seconds(self, version: int, groups: Sequence[ReadyGroup]) -> float:
        """What a step takes, with the groups dealt to ranks as the manifest does."""
        tokens = {group.seq: group.tokens for group in groups}
        shares = plan(groups, self.count, self.minibatches)
        slowest = sum(max(sum(tokens[seq] for seq in share) for share in minibatch) for minibatch in shares)
        return self._seconds(slowest, len(shares))

    def evenly(self, tokens: float) -> float:
        """What a step of so many tokens takes where ranks have equal shares."""
        return self._seconds(tokens / self.count, self.minibatches)

    def _seconds(self, tokens: float, minibatches: int) -> float:
        return self.fixed_s + tokens * self.token_s + (minibatches * self.reduce_s if self.count > 1 else 0.0)


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
    after the other; seal_s from a group's last token to its completion, commit_s from a commit to dispatch."""

    grant_s: float = 0.0
    resolve_s: float = 0.0
    seal_s: float = 0.0
    commit_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Trained:
    """What became a version: from when to when it was trained, and the oldest version of its tokens' engines."""

    begin: float
    end: float
    oldest: int


@dataclass(slots=True)
class _Group:
    size: int
    tokens: list[int] = field(default_factory=list)
    head: int = 1 << 60


@dataclass(slots=True)
class _Engine:
    """Replies that share one engine: each is at `served` tokens more than when it came."""

    running: list[tuple[float, int, int, int, float]] = field(default_factory=list)
    """(tokens served when it ends, order, ticket, version of its first token, tokens), the next to end first"""
    served: float = 0.0
    at: float = 0.0
    paused_until: float = 0.0
    stamp: int = 0


class Simulation:
    """One run. `reply(ticket, sample)` is the tokens that it takes; without `prompts` there are always enough."""

    def __init__(
        self,
        policy: Policy,
        engines: Engines,
        reply: Callable[[int, int], float],
        step: Step,
        delays: Delays | None = None,
        prompts: int | None = None,
    ) -> None:
        self._policy, self._engines, self._reply, self._step = policy, engines, reply, step
        self._delays, self._prompts = delays or Delays(), prompts
        self._dispatch = Bench(records.dispatcher(policy.release), strict=False)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._now = 0.0
        self._fleet = [_Engine() for _ in range(engines.count)]
        self._line: deque[tuple[int, float]] = deque()
        """(ticket, tokens) of samples that no engine has room for"""
        self._groups: dict[int, _Group] = {}
        self._learning = LearningOrder(policy.batch, policy.eta, policy.release)
        self._heads: dict[int, int] = {}
        self._seq_hi = 0
        self._is_training = False
        self._dispatch_until = 0.0
        self._versions: list[Trained] = []

    def run(self, versions: int) -> list[Trained]:
        """Simulate until so many versions are committed. Raises RuntimeError when nothing can happen before that."""
        p = self._policy
        self._fold(records.version_zero(p.batch, p.eta, p.group_size))
        for number in range((versions + p.eta + 1) * p.batch if self._prompts is None else self._prompts):
            self._fold(records.prompt(number))
        self._tell(0.0, records.completion(None, [], -1, -1, 0.0))
        while len(self._versions) < versions:
            if not self._events:
                raise RuntimeError(f"at rest at {self._now:.1f} s with {len(self._versions)} versions")
            self._now, _, act = heapq.heappop(self._events)
            act()
        return self._versions

    def _at(self, time: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), act))

    # -- dispatch

    def _fold(self, turn: records.Turn) -> list[Emit]:
        topic, schema, record = turn
        return self._dispatch.record(topic, "k", schema, record)

    def _tell(self, seconds: float, turn: records.Turn) -> None:
        """Dispatch reads a record. What it says reaches the others once it had the time for that."""
        emits = self._fold(turn)
        time = max(self._now, self._dispatch_until) + seconds
        for emit in emits:
            if emit.name == "Resolution":
                self._at(time, partial(self._resolve, emit.record))
        for emit in emits:
            if emit.name == "Grant":
                time += self._delays.grant_s
                self._at(time, partial(self._start, emit.record))
        self._dispatch_until = time

    def _resolve(self, resolution: Any) -> None:
        self._learning.fold(resolution)
        if resolution["kind"] == "ready":
            self._heads[resolution["seq"]] = resolution["v_head"]
        self._train()

    # -- engines

    def _start(self, grant: Any) -> None:
        ticket = grant["ticket"]
        self._groups[ticket] = _Group(grant["group_size"])
        self._line.extend((ticket, self._reply(ticket, sample)) for sample in grant["samples"])
        self._fill()

    def _fill(self) -> None:
        """Give samples in line to the least loaded engines that have room."""
        touched = {}
        while self._line and len((engine := min(self._fleet, key=_load)).running) < self._engines.concurrency:
            ticket, tokens = self._line.popleft()
            self._serve(engine)
            reply = (engine.served + tokens, next(self._order), ticket, len(self._versions), tokens)
            heapq.heappush(engine.running, reply)
            touched[id(engine)] = engine
        for engine in touched.values():
            self._schedule(engine)

    def _token_s(self, engine: _Engine) -> float:
        return self._engines.token_s + len(engine.running) * self._engines.crowd_s

    def _serve(self, engine: _Engine) -> None:
        """Bring it to the present."""
        begin = max(engine.at, engine.paused_until)
        if self._now > begin:
            engine.served += (self._now - begin) / self._token_s(engine)
        engine.at = max(self._now, engine.at)

    def _schedule(self, engine: _Engine) -> None:
        """Say when its next reply ends, as things stand."""
        engine.stamp += 1
        if engine.running:
            rest = max(0.0, engine.running[0][0] - engine.served) * self._token_s(engine)
            self._at(max(self._now, engine.paused_until) + rest, partial(self._end, engine, engine.stamp))

    def _end(self, engine: _Engine, stamp: int) -> None:
        if stamp != engine.stamp:
            return
        self._serve(engine)
        engine.served, _, ticket, head, tokens = heapq.heappop(engine.running)
        group = self._groups[ticket]
        group.tokens.append(round(tokens))
        group.head = min(group.head, head)
        if len(group.tokens) == group.size:
            del self._groups[ticket]
            self._at(self._now + self._delays.seal_s, partial(self._seal, ticket, group, len(self._versions)))
        self._fill()
        self._schedule(engine)

    def _seal(self, ticket: int, group: _Group, tail: int) -> None:
        self._tell(self._delays.resolve_s, records.completion(ticket, group.tokens, group.head, tail, self._now))

    # -- learners

    def _train(self) -> None:
        """Begin the next step, when its batch is whole and the learners are free."""
        batch = None if self._is_training else self._learning.next(self._seq_hi)
        if batch is not None:
            self._is_training = True
            groups = [ReadyGroup(seq, sum(one["tokens"])) for seq, one in enumerate(batch.groups, batch.seq_lo)]
            oldest = min(self._heads.pop(group.seq) for group in groups)
            end = self._now + self._step(len(self._versions), groups)
            self._at(end, partial(self._commit, batch, Trained(self._now, end, oldest)))

    def _commit(self, batch: Batch, step: Trained) -> None:
        self._versions.append(step)
        self._seq_hi, self._is_training = batch.seq_hi, False
        self._learning.commit(batch.seq_hi)
        if self._engines.load_s:
            for engine in self._fleet:
                self._serve(engine)
                engine.paused_until = self._now + self._engines.load_s
                self._schedule(engine)
        turn = records.commit(len(self._versions), batch.seq_hi)
        self._at(self._now + self._delays.commit_s, partial(self._tell, 0.0, turn))
        self._train()


def _load(engine: _Engine) -> int:
    return len(engine.running)


def period(versions: Sequence[Trained], warm: int) -> float:
    """Mean seconds between two versions, the first `warm` left out."""
    return (versions[-1].end - versions[warm - 1].end) / (len(versions) - warm)


def staleness(versions: Sequence[Trained]) -> int:
    """The oldest token that was trained, in versions."""
    return max(number - step.oldest for number, step in enumerate(versions))
