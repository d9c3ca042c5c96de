"""Randomness that is counted, not kept: a step seeds itself."""

from __future__ import annotations

import numpy as np
import torch


def reseed(seed: int, step: int, rank: int) -> None:
    """Makes torch draw what belongs to this step of this rank."""
    words = np.random.SeedSequence((seed, step, rank)).generate_state(2)
    torch.manual_seed(int(words[0]) << 31 | int(words[1]) >> 1)
