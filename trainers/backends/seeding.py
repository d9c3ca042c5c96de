"""What makes a step give the same bytes again: randomness that is counted, not kept; algorithms that do not race."""

from __future__ import annotations

import os

import numpy as np
import torch


def seed_step(seed: int, step: int, rank: int) -> None:
    """Makes torch draw what belongs to this step of this rank."""
    words = np.random.SeedSequence((seed, step, rank)).generate_state(2)
    torch.manual_seed(int(words[0]) << 31 | int(words[1]) >> 1)


def repeatable(on: bool) -> None:
    """Whether torch uses only algorithms that give the same bytes again, for all of this process."""
    if on:
        # without it cuBLAS refuses to work deterministically; it is read when the first CUDA context comes to be
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(on)
