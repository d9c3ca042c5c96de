"""From settings to a trainer, and its warm-up."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from infra.config import Settings
from infra.errors import ConfigError
from schemas.records import WeightVersion
from trainers import checkpoint
from trainers.algorithms.registry import algorithm
from trainers.backends.fsdp import Adam, TorchBackend
from trainers.batches.sample import Sample
from trainers.learning import Schedule, Trainer


def build_trainer(settings: Settings) -> Trainer:
    """The trainer that `[learner]` describes. Raises ConfigError for what no trainer can do."""
    learner = settings.learner
    if learner.algorithm not in ("grpo", "decoupled"):
        raise ConfigError(f"[learner] algorithm {learner.algorithm!r} is none: choose grpo or decoupled")
    chosen = algorithm(
        "grpo",
        minibatches=learner.minibatches,
        clip_low=learner.clip_low,
        clip_high=learner.clip_high,
        decoupled=learner.algorithm == "decoupled",
    )
    adam = Adam(weight_decay=learner.weight_decay, clip=learner.max_grad_norm)
    return Trainer(TorchBackend(adam), chosen, Schedule(learner.lr), budget=learner.tokens_per_pack)


def warm_up(trainer: Trainer, weights: WeightVersion) -> None:
    """Load a version and train a step that is thrown away, so that joining costs the others no first-time work."""
    backend = trainer.backend
    backend.form(0, 1, None, 60.0)
    backend.load(checkpoint.read(Path(weights["uri"]), digest=weights["digest"]))
    samples = [_sample(reward) for reward in (0.0, 1.0)]
    trainer.train(samples, minibatches=[[0]], version=weights["version"])
    backend.tear_down()


def _sample(reward: float) -> Sample:
    return Sample(
        tokens=np.zeros(8, np.int32),
        mask=np.array([0] * 4 + [1] * 4, np.uint8),
        logprobs=np.full(8, -1.0, np.float32),
        versions=np.array([-1] * 4 + [0] * 4, np.int32),
        reward=reward,
        seq=0,
        group="warm-up",
        trajectory=f"warm-up-{reward}",
    )
