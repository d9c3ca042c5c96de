"""How many tokens a micro-batch may have on a card, measured before the first step.

    peak(n) = floor + n slope             bytes of a forward and backward pass of n tokens, at two sizes n
    budget  = (room - reserve - floor) / slope

What steps will hold beside (moments that the first of them makes) is taken off what is free. Invariant: measuring
leaves weights, moments and gradients as they were, and all ranks of a group measure together, since their passes are
collectives.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from millrace.trainers.batches.packing import MicroBatch, pack
from millrace.trainers.batches.sample import Sample
from millrace.trainers.errors import REMEDIES, BadConfiguration

SIZES = (512, 2048)
"""tokens of the two passes"""
LEAST, MOST, GRAIN = 256, 32768, 256
"""of a budget in tokens; more than MOST in a row gains nothing"""
RESERVE = 0.08
"""share of a card that is left for what the allocator loses between blocks"""


def probe(tokens: int, vocabulary: int, longest: int) -> MicroBatch:
    """A micro-batch of `tokens` tokens in samples of at most `longest`, of which all but the first of each train."""
    size = min(longest, SIZES[0], tokens)
    draw = np.random.default_rng(tokens)
    return pack([_sample(draw.integers(0, vocabulary, size), index) for index in range(tokens // size)])


def _sample(tokens: np.ndarray[tuple[int], np.dtype[np.int64]], index: int) -> Sample:
    return Sample(
        tokens=tokens.astype(np.int32),
        mask=np.array([0] + [1] * (len(tokens) - 1), np.uint8),
        logprobs=np.zeros(len(tokens), np.float32),
        versions=np.zeros(len(tokens), np.int32),
        reward=0.0,
        seq=index,
        group="probe",
        trajectory=f"probe-{index}",
    )


def find_budget(measure: Callable[[int], int], room: int, total: int) -> int:
    """Tokens. measure(tokens) -> peak bytes of a pass; room: bytes that passes may take; total: bytes of the card.
    BadConfiguration, with what to do, where not even the smallest row fits."""
    small, large = (measure(size) for size in SIZES)
    slope = max(1.0, (large - small) / (SIZES[1] - SIZES[0]))
    floor = small - slope * SIZES[0]
    budget = int((room - RESERVE * total - floor) / slope)
    if budget < LEAST:
        raise BadConfiguration(
            f"the model leaves {room / 2**30:.1f} of {total / 2**30:.1f} GiB of the card, and a row of {LEAST} tokens "
            f"takes {(floor + LEAST * slope) / 2**30:.1f}: {REMEDIES}"
        )
    return min(MOST, budget // GRAIN * GRAIN)
