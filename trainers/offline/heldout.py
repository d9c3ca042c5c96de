"""What an algorithm measures on samples that it does not learn from."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from millrace.trainers.algorithms.base import Algorithm
from millrace.trainers.backends.torch.backend import TorchBackend
from millrace.trainers.batches.packing import cut, pack
from millrace.trainers.batches.sample import Sample


def measure(backend: TorchBackend, algorithm: Algorithm, samples: Sequence[Sample], budget: int) -> dict[str, float]:
    """Mean loss and measures over `samples`, by name. Backends of one rank; no weight changes."""
    totals: dict[str, float] = {"loss": 0.0, "count": 0.0, **dict.fromkeys(algorithm.measures, 0.0)}
    model = backend.model
    model.train(False)
    try:
        for members in cut(samples, budget, whole=algorithm.whole):
            micro = pack(members)
            scores = {
                role: micro.split(backend.score([micro], algorithm.temperature, role)[0]) for role in algorithm.needs
            }
            micro = micro.attach_samples(algorithm.weigh(members, None, scores))
            with torch.no_grad():
                summed, sums = algorithm.evaluate(backend.passes(micro))
            totals["loss"] += float(summed)
            totals["count"] += algorithm.count(micro)
            for name, value in sums.items():
                totals[name] += float(value)
    finally:
        model.train(True)
    tokens, count, loss = (totals.pop(name) for name in ("kept", "count", "loss"))
    means = {name: value / tokens if tokens else math.nan for name, value in totals.items()}
    return {"loss": loss / count if count else math.nan, **means}
