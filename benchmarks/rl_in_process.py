"""The whole of learning in one process, without the loop: sample, reward, train. What the demo must at least reach, and
how `study_algorithms` and `study_staleness` compare."""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

import torch
from transformers import PreTrainedModel

from millrace.apps.demo import sort_digits, tiny
from millrace.trainers.algorithms.base import Algorithm
from millrace.trainers.backends.torch.backend import TorchBackend
from millrace.trainers.batches.sample import Sample
from millrace.trainers.learning import Report, Schedule, Trainer
from millrace.trainers.sampling import sample
from millrace.trainers.weights.state import State

ATTEMPTS = 4
"""Times the batch that may be sampled to fill it with groups that the algorithm accepts."""


@dataclass(slots=True)
class Rehearsed:
    """rewards: mean reward of all that each step sampled; accuracy: mean sampled reward of the last version on held-out
    prompts; generating and training: seconds in all."""

    state: State
    rewards: list[float] = field(default_factory=list)
    accuracy: float = 0.0
    generating: float = 0.0
    training: float = 0.0

    def gain(self, window: int = 10) -> float:
        """How far the mean of the last `window` steps is above that of the first three."""
        first, last = self.rewards[:3], self.rewards[-window:]
        return sum(last) / len(last) - sum(first) / len(first)


def rehearse(
    state: State,
    algorithm: Algorithm,
    schedule: Schedule,
    *,
    steps: int,
    groups: int = 64,
    group_size: int = 8,
    seed: int = 0,
    critic_lr: float | None = None,
    refill: bool = False,
    lag: int = 0,
    progress: Callable[[int, Report], None] = lambda step, report: None,
) -> Rehearsed:
    """RL on the sort task from `state`: each step samples `groups` x `group_size` replies from the weights of `lag`
    versions before (of the first version while there are not so many).

    `state` is the reference and the teacher where the algorithm wants one. refill: groups that the algorithm does not
    accept are replaced by new ones, up to ATTEMPTS batches; else the batch gets smaller."""
    backend = TorchBackend(device="cpu")
    backend.form(0, 1, None, 60.0)
    held = {"reference": lambda: state, "teacher": lambda: state}
    trainer = Trainer(backend, algorithm, schedule, held=held, critic_lr=critic_lr)
    trainer.load(state)
    source = sort_digits.prompts(seed + 1)
    held_out = list(islice(sort_digits.prompts(seed, evaluation=True), 256))
    generator = torch.Generator().manual_seed(seed)
    result = Rehearsed(state)
    behind = Behind(backend.model, lag)
    for version in range(steps):
        behaviour = behind.sampler()
        started = time.monotonic()
        batch: list[Sample] = []
        drawn: list[Sample] = []
        for attempt in range(ATTEMPTS if refill else 1):
            missing = groups - len({one.seq for one in batch})
            if missing == 0:
                break
            digits = list(islice(source, missing))
            fresh = _sample(behaviour, digits, group_size, max(0, version - lag), (version, attempt), generator)
            drawn += fresh
            batch += algorithm.accept(fresh) if refill else fresh
        sampled = time.monotonic()
        report = trainer.train(batch, minibatches=_minibatches(batch, algorithm.minibatches), version=version)
        result.rewards.append(sum(one.reward or 0.0 for one in drawn) / len(drawn))
        result.generating += sampled - started
        result.training += time.monotonic() - sampled
        progress(version, report)
    result.accuracy = tiny.accuracy(backend, held_out, generator, n=4)
    result.state = backend.gather() or state
    backend.tear_down()
    return result


class Behind:
    """The policy as it was `lag` versions ago; with 0, the live one itself."""

    def __init__(self, live: PreTrainedModel, lag: int) -> None:
        self._live = live
        self._past: deque[dict[str, torch.Tensor]] = deque(maxlen=lag + 1)
        self._sampler = copy.deepcopy(live) if lag else live

    def sampler(self) -> PreTrainedModel:
        """What samples for the next version's batch; call it once a version."""
        if self._past.maxlen == 1:
            return self._live
        self._past.append({name: tensor.clone() for name, tensor in self._live.state_dict().items()})
        self._sampler.load_state_dict(self._past[0])
        return self._sampler


def _sample(
    model: PreTrainedModel,
    digits: list[str],
    n: int,
    version: int,
    at: tuple[int, int],
    generator: torch.Generator,
) -> list[Sample]:
    """Samples of `version`, named by `at`: the version that trains and the attempt to fill its batch."""
    prompts = [tiny.encode(d) for d in digits]
    replies = sample(model, prompts, n=n, max_tokens=tiny.REPLY, end=tiny.EOS, generator=generator)
    trains, attempt = at
    return [
        tiny.to_sample(
            prompts[r.prompt],
            r.tokens,
            r.logprobs,
            reward=tiny.reward(digits[r.prompt], r),
            seq=attempt * 10**6 + r.prompt,
            name=f"{trains}.{attempt}.{index}",
            version=version,
            is_truncated=not r.finished,
        )
        for index, r in enumerate(replies)
    ]


def _minibatches(batch: list[Sample], count: int) -> list[list[int]]:
    """Whole groups in order, as even as they divide."""
    seqs = sorted({one.seq for one in batch})
    return [seqs[len(seqs) * i // count : len(seqs) * (i + 1) // count] for i in range(count)]
