"""How FSDP2 cuts a parameter: dimension 0 in `torch.chunk`s, one a rank; ranks beyond the last chunk hold none of
it."""

from __future__ import annotations

import math


def rows(size: int, world: int, rank: int) -> tuple[int, int]:
    """[lo, hi) of dimension 0 that `rank` holds."""
    each = math.ceil(size / world)
    return min(rank * each, size), min((rank + 1) * each, size)
