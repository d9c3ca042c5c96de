"""The whole of learning in one process, without the loop: sample, reward, train. What the demo must at least reach, and
how algorithms are compared (`benchmarks/study_algorithms.py`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

import torch

from trainers import tiny
from trainers.algorithms.base import Algorithm
from trainers.backends.fsdp import Adam, TorchBackend
from trainers.batches.sample import Sample
from trainers.learning import Report, Schedule, Trainer
from trainers.sampling import sample
from trainers.state import State
from trainers.tasks import sort_digits

ATTEMPTS = 4
"""Times the batch that may be sampled to fill it with groups that the algorithm accepts."""


@dataclass(slots=True)
class Rehearsed:
    """rewards: mean reward of all that each step sampled; generating and training: seconds in all."""

    state: State
    rewards: list[float] = field(default_factory=list)
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
    adam: Adam | None = None,
    critic_lr: float | None = None,
    refill: bool = False,
    progress: Callable[[int, Report], None] = lambda step, report: None,
) -> Rehearsed:
    """RL on the sort task from `state`: each step samples `groups` x `group_size` replies from the weights as they are.

    `state` is the reference and the teacher where the algorithm wants one. refill: groups that the algorithm does not
    accept are replaced by new ones, up to ATTEMPTS batches; else the batch gets smaller."""
    backend = TorchBackend(adam, device="cpu")
    backend.form(0, 1, None, 60.0)
    held = {"reference": lambda: state, "teacher": lambda: state}
    trainer = Trainer(backend, algorithm, schedule, held=held, critic_lr=critic_lr)
    trainer.load(state)
    source = sort_digits.prompts(seed + 1)
    generator = torch.Generator().manual_seed(seed)
    result = Rehearsed(state)
    for version in range(steps):
        started = time.monotonic()
        batch: list[Sample] = []
        drawn: list[Sample] = []
        for attempt in range(ATTEMPTS if refill else 1):
            missing = groups - len({one.seq for one in batch})
            if missing == 0:
                break
            digits = list(islice(source, missing))
            fresh = _sample(backend, digits, group_size, version, attempt, generator)
            drawn += fresh
            batch += algorithm.accept(fresh) if refill else fresh
        sampled = time.monotonic()
        report = trainer.train(batch, minibatches=_minibatches(batch, algorithm.minibatches), version=version)
        result.rewards.append(sum(one.reward or 0.0 for one in drawn) / len(drawn))
        result.generating += sampled - started
        result.training += time.monotonic() - sampled
        progress(version, report)
    result.state = backend.gather() or state
    backend.tear_down()
    return result


def _sample(
    backend: TorchBackend, digits: list[str], n: int, version: int, attempt: int, generator: torch.Generator
) -> list[Sample]:
    prompts = [tiny.encode(d) for d in digits]
    replies = sample(backend.model, prompts, n=n, max_tokens=tiny.REPLY, end=tiny.EOS, generator=generator)
    return [
        tiny.to_sample(
            prompts[r.prompt],
            r.tokens,
            r.logprobs,
            reward=tiny.reward(digits[r.prompt], r),
            seq=attempt * 10**6 + r.prompt,
            name=f"{version}.{attempt}.{index}",
            version=version,
            truncated=not r.finished,
        )
        for index, r in enumerate(replies)
    ]


def _minibatches(batch: list[Sample], count: int) -> list[list[int]]:
    """Whole groups in order, as even as they divide."""
    seqs = sorted({one.seq for one in batch})
    return [seqs[len(seqs) * i // count : len(seqs) * (i + 1) // count] for i in range(count)]
