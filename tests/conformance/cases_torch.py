"""Layouts of the torch backend."""

from __future__ import annotations

from millrace.trainers.backends.parallel.schedules import GPIPE, INTERLEAVED
from millrace.trainers.backends.torch.compute import Compute
from tests.conformance.cases import MODELS, MOE, QWEN2, QWEN3, Case, Tolerance

CI = {
    *(("torch:d2", QWEN2), ("torch:t2", QWEN2), ("torch:p2", QWEN2), ("torch:c2", QWEN2), ("torch:d2e2", MOE)),
    *(("torch:d2t2", QWEN3), ("torch:d2p2", QWEN3), ("torch:d2c2", QWEN3)),
    *(("torch:t2p2", QWEN3), ("torch:t2c2", QWEN2), ("torch:p2c2", QWEN2), ("torch:d2t2e4", MOE)),
}
"""Each dimension alone, each pair of the four that need no experts, and experts with two of them."""

LAYOUTS = (
    *("torch:d2", "torch:d3", "torch:d4", "torch:t2", "torch:t4", "torch:p2", "torch:p4", "torch:c2", "torch:c4"),
    *("torch:d2t2", "torch:d2p2", "torch:d2c2", "torch:t2p2", "torch:t2c2", "torch:p2c2"),
)
EXPERT_LAYOUTS = (
    *("torch:d2e2", "torch:d4e2", "torch:d4e4", "torch:t2e2", "torch:t4e4", "torch:c2e2", "torch:c4e4"),
    *("torch:d2t2e2", "torch:d2t2e4", "torch:d2p2e2", "torch:d2c2e2", "torch:d2c2e4", "torch:t2c2e4", "torch:t2p2e2"),
    "torch:p2c2e2",
)

CASES = [
    Case(layout, model, ci=(layout, model) in CI)
    for layouts, models in ((LAYOUTS, MODELS), (EXPERT_LAYOUTS, (MOE,)))
    for layout in layouts
    for model in models
]
CASES += [
    Case(layout, QWEN3, options={"schedule": schedule})
    for layout, schedule in [
        ("torch:p2", GPIPE),
        ("torch:p2", INTERLEAVED),
        ("torch:d2p2", INTERLEAVED),
        ("torch:t2p2", INTERLEAVED),
        ("torch:p2c2", INTERLEAVED),
    ]
]

HALF = Tolerance(loss=3e-3, norm=3e-2, weight=1.2e-2)
"""bf16 against fp32: rounding is 65,536 times as coarse, routers choose otherwise, Adam's signs differ."""

CASES += [
    Case(layout, model, options={"compute": compute}, called=called, tolerance=tolerance)
    for layout, model in (("torch:d2t2", QWEN3), ("torch:d2t2e4", MOE))
    for called, compute, tolerance in (
        ("checkpointing", Compute(checkpointing=True), None),
        ("bf16", Compute(bf16=True), HALF),
    )
]
