"""How many tokens a micro-batch may have on a card, measured before the first step.

    peak(n) = floor + n slope             bytes of a forward and backward pass of n tokens, at two sizes n
    budget  = (room - reserve - floor) / slope

A rank alone halves sizes that its card has no room for, down to the smallest row that is worth a step. Among others it
cannot, since they are in the collectives of the pass that failed: then nobody measures (`learning.py`).

What steps will hold beside (moments that the first of them makes) is taken off what is free. Invariant: measuring
leaves weights, moments and gradients as they were, and all ranks of a group measure together, since their passes are
collectives.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import torch

from millrace.trainers.backends.devices import memory_text
from millrace.trainers.batches.packing import MicroBatch, pack
from millrace.trainers.batches.sample import Sample
from millrace.trainers.errors import REMEDIES, BadConfiguration

log = logging.getLogger("millrace.memory")

SIZES = (512, 2048)
"""tokens of the two passes, at first"""
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


def find_budget(measure: Callable[[int], int], room: int, total: int, *, alone: bool = True) -> int:
    """Tokens. measure(tokens) -> peak bytes of a pass; room: bytes that passes may take; total: bytes of the card;
    alone: whether this rank may measure what others do not. BadConfiguration, with what to do, where not even the
    smallest row fits; OutOfMemoryError where a pass did not fit and this rank is not alone."""
    less, more = SIZES
    if not alone:
        return _budget(less, measure(less), more, measure(more), room, total)
    peaks = _pair(measure, less, more)
    while peaks is None and more > LEAST:
        less, more = less // 2, more // 2
        peaks = _pair(measure, less, more)
    if peaks is None:
        raise BadConfiguration(
            f"the model leaves {room / 2**30:.1f} of {total / 2**30:.1f} GiB of the card, and a row of {more} tokens "
            f"takes more: {REMEDIES}"
        )
    return _budget(less, peaks[0], more, peaks[1], room, total)


def _budget(less: int, small: int, more: int, large: int, room: int, total: int) -> int:
    """From peaks `small` of `less` tokens and `large` of `more`."""
    slope = max(1.0, (large - small) / (more - less))
    floor = small - slope * less
    budget = int((room - RESERVE * total - floor) / slope)
    if budget < LEAST:
        raise BadConfiguration(
            f"the model leaves {room / 2**30:.1f} of {total / 2**30:.1f} GiB of the card, and a row of {LEAST} tokens "
            f"takes {(floor + LEAST * slope) / 2**30:.1f}: {REMEDIES}"
        )
    return min(MOST, budget // GRAIN * GRAIN)


def _pair(measure: Callable[[int], int], less: int, more: int) -> tuple[int, int] | None:
    """What passes of two sizes take; None where that is more than there is."""
    try:
        return measure(less), measure(more)
    except torch.OutOfMemoryError as error:
        log.info("measuring passes of %d and %d tokens: %s", less, more, memory_text(error))
        return None
