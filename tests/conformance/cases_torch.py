"""Layouts of the torch backend."""

from __future__ import annotations

from tests.support.conformance.cases import MODELS, MOE, QWEN2, QWEN3, Case

CI = {("torch:d2", QWEN2), ("torch:d4", QWEN3), ("torch:d2", MOE), ("torch:c2", QWEN2), ("torch:d2c2", QWEN3)}

CASES = [
    Case(layout, model, ci=(layout, model) in CI)
    for layout in ("torch:d2", "torch:d4", "torch:c2", "torch:c4", "torch:d2c2")
    for model in MODELS
]
