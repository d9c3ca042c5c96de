"""Layouts of the torch backend."""

from __future__ import annotations

from tests.support.conformance.cases import MODELS, MOE, QWEN2, QWEN3, Case
from trainers.backends.parallel.schedules import GPIPE, INTERLEAVED

CI = {
    ("torch:d2", QWEN2), ("torch:d4", QWEN3), ("torch:d2", MOE),
    ("torch:c2", QWEN2), ("torch:d2c2", QWEN3),
    ("torch:p2", QWEN2), ("torch:d2p2", QWEN3),
}  # fmt: skip

LAYOUTS = [
    "torch:d2", "torch:d4",
    "torch:c2", "torch:c4", "torch:d2c2",
    "torch:p2", "torch:p4", "torch:d2p2", "torch:p2c2",
]  # fmt: skip

CASES = [Case(layout, model, ci=(layout, model) in CI) for layout in LAYOUTS for model in MODELS]
CASES += [
    Case(layout, QWEN3, options={"schedule": schedule})
    for layout, schedule in [
        ("torch:p2", GPIPE),
        ("torch:p2", INTERLEAVED),
        ("torch:d2p2", INTERLEAVED),
        ("torch:p2c2", INTERLEAVED),
    ]
]
