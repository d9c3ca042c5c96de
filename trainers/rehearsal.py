"""The whole of learning in one process, without the loop: sample, reward, train. What the demo must at least reach."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import torch

from trainers import tiny
from trainers.algorithms.base import Algorithm
from trainers.backends.fsdp import TorchBackend
from trainers.learning import Report, Schedule, Trainer
from trainers.sampling import sample
from trainers.state import State
from trainers.tasks import sort_digits


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """rewards: mean sampled reward of each step's batch; generating and training: seconds in all."""

    rewards: list[float]
    generating: float
    training: float
    state: State


def rehearse(
    state: State,
    algorithm: Algorithm,
    schedule: Schedule,
    *,
    steps: int,
    groups: int = 64,
    group_size: int = 8,
    seed: int = 0,
    progress: Callable[[int, Report], None] = lambda step, report: None,
) -> Rehearsed:
    """RL on the sort task from `state`: each step samples `groups` x `group_size` replies from the weights as they
    are."""
    backend = TorchBackend(device="cpu")
    backend.form(0, 1, None, 60.0)
    backend.load(state)
    trainer = Trainer(backend, algorithm, schedule)
    source = sort_digits.prompts(seed + 1)
    generator = torch.Generator().manual_seed(seed)
    rewards, generating, training = [], 0.0, 0.0
    for version in range(steps):
        started = time.monotonic()
        digits = list(islice(source, groups))
        prompts = [tiny.encode(d) for d in digits]
        replies = sample(backend.model, prompts, n=group_size, max_tokens=tiny.REPLY, end=tiny.EOS, generator=generator)
        sampled = time.monotonic()
        batch = [
            tiny.to_sample(
                prompts[r.prompt],
                r.tokens,
                r.logprobs,
                reward=tiny.reward(digits[r.prompt], r),
                seq=r.prompt,
                name=f"{version}.{index}",
                version=version,
            )
            for index, r in enumerate(replies)
        ]
        halves = [
            range(groups * i // algorithm.minibatches, groups * (i + 1) // algorithm.minibatches)
            for i in range(algorithm.minibatches)
        ]
        report = trainer.train(batch, minibatches=halves, version=version)
        rewards.append(report.metrics["reward_mean"])
        generating += sampled - started
        training += time.monotonic() - sampled
        progress(version, report)
    trained = backend.gather() or state
    backend.tear_down()
    return Rehearsed(rewards, generating, training, trained)
