"""Stages of DeepSpeed's ZeRO."""

from __future__ import annotations

from tests.conformance.cases import MODELS, MOE, QWEN2, QWEN3, Case

CI = {("deepspeed:d2", 2, QWEN2), ("deepspeed:d2", 3, QWEN3), ("deepspeed:d4", 1, MOE)}

CASES = [
    Case(
        layout,
        model,
        ci=(layout, stage, model) in CI,
        options={"stage": stage, "device": "cpu"},
        called=f"stage={stage}",
    )
    for layout in ("deepspeed:d2", "deepspeed:d3", "deepspeed:d4")
    for stage in (0, 1, 2, 3)
    for model in MODELS
]
