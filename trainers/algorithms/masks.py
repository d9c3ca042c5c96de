"""Which trainable tokens may pull. Denominators keep counting the others (`aggregation.py`)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trainers.batches.sample import Sample


def fresh(sample: Sample, oldest: int | None) -> NDArray[np.uint8]:
    """keep uint8[T]: trainable tokens of version >= oldest (release policy mask-head: oldest = v - eta); all when
    None."""
    keep: NDArray[np.bool_] = sample.mask != 0
    if oldest is not None:
        keep = keep & (sample.versions >= oldest)
    return np.asarray(keep, np.uint8)
