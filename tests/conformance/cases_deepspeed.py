"""Stages of DeepSpeed's ZeRO."""

from __future__ import annotations

from tests.support.conformance.cases import MODELS, MOE, QWEN2, QWEN3, Case, Tolerance

NORM = Tolerance(norm=1e-6)
"""DeepSpeed adds squares up in fp32."""
EXPERTS = Tolerance(norm=1.5e-6, weight=2.3e-4)
CI = {("deepspeed:d2", 1, QWEN2), ("deepspeed:d2", 0, QWEN3), ("deepspeed:d4", 1, MOE)}

CASES = [
    Case(
        layout,
        model,
        ci=(layout, stage, model) in CI,
        options={"stage": stage, "device": "cpu"},
        tolerance=EXPERTS if model == MOE else NORM,
    )
    for layout, stages in (("deepspeed:d2", (0, 1)), ("deepspeed:d4", (1,)))
    for stage in stages
    for model in MODELS
]
