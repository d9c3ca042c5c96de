"""A sample: one lineage of a trajectory, as the engine sampled it.

Invariants: the four arrays have one length; the first token is never trainable (nothing predicts it); log-probabilities
are finite where mask is 1. What breaks them is a `BadSample`, so that one bad record never reaches a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millrace.schemas.arrays import unpack
from millrace.schemas.errors import SchemaError
from millrace.schemas.records import Trajectory
from millrace.trainers.errors import BadSample


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """tokens int32[T]; mask uint8[T], 1 where the policy sampled and may train; logprobs float32[T], the behaviour
    policy's, 0 where mask is 0; versions int32[T], -1 where not generated; reward of the trajectory, None when none
    arrived (or it is not a number); seq, the group's place in the policy's order; truncated, whether the reply was cut
    off by a limit instead of ended by the policy; is_mismatch, whether it is of no trajectory, but a prompt with the
    reply to another one (`kto.mismatches`)."""

    tokens: NDArray[np.int32]
    mask: NDArray[np.uint8]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    reward: float | None
    seq: int
    group: str
    trajectory: str
    lineage: int = 0
    truncated: bool = False
    is_mismatch: bool = False

    def __post_init__(self) -> None:
        where = f"trajectory {self.trajectory}, lineage {self.lineage}"
        lengths = {len(self.tokens), len(self.mask), len(self.logprobs), len(self.versions)}
        if len(lengths) != 1:
            raise BadSample(
                f"{where}: arrays of different lengths {sorted(lengths)}; its producer must write one entry a token"
            )
        if len(self.tokens) == 0:
            raise BadSample(f"{where}: no tokens; its producer must not seal empty lineages")
        if self.mask[0]:
            raise BadSample(f"{where}: the first token is marked trainable, but nothing predicts it; mask it")
        if not np.isfinite(self.logprobs[self.mask != 0]).all():
            raise BadSample(f"{where}: a trainable token has no finite behaviour log-probability; mask it")
        if self.reward is not None and not math.isfinite(self.reward):
            raise BadSample(f"{where}: a reward of {self.reward}; give None where there is none")

    @property
    def length(self) -> int:
        """Tokens, trainable or not."""
        return len(self.tokens)

    @property
    def trainable(self) -> int:
        """Tokens that the policy sampled and that may train."""
        return int(np.count_nonzero(self.mask))


def samples_of(trajectory: Trajectory, seq: int) -> list[Sample]:
    """The samples of a decoded `millrace.Trajectory` record; raises BadSample where it is impossible."""
    reward = trajectory["reward"]
    if reward is not None and not math.isfinite(reward):
        reward = None
    try:
        return [
            Sample(
                tokens=unpack(lineage["tokens"]).astype(np.int32, copy=False),
                mask=unpack(lineage["mask"]).astype(np.uint8, copy=False),
                logprobs=unpack(lineage["logprobs"]).astype(np.float32, copy=False),
                versions=unpack(lineage["versions"]).astype(np.int32, copy=False),
                reward=reward,
                seq=seq,
                group=trajectory["group"],
                trajectory=trajectory["id"],
                lineage=index,
                truncated=trajectory["status"] == "truncated",
            )
            for index, lineage in enumerate(trajectory["lineages"])
        ]
    except SchemaError as error:
        raise BadSample(f"trajectory {trajectory['id']}: {error}") from error


def check(samples: Sequence[Sample], *, vocabulary: int, longest: int) -> None:
    """Raises BadSample when a token is outside [0, vocabulary) or a sample is longer than the model's context."""
    for sample in samples:
        where = f"trajectory {sample.trajectory}, lineage {sample.lineage}"
        if sample.length > longest:
            raise BadSample(f"{where}: {sample.length} tokens, the model takes {longest}; lower the engine's limit")
        if sample.tokens.min() < 0 or sample.tokens.max() >= vocabulary:
            raise BadSample(f"{where}: a token id outside 0..{vocabulary - 1}; the engine serves another tokenizer")
