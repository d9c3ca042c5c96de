"""Layouts of the Megatron backend."""

from __future__ import annotations

from tests.conformance.cases import EXPERTS, MOE, QWEN2, QWEN3, Case, Tolerance
from tests.support import megatron_shim

NEAR = Tolerance(norm=9e-7)

CI = {
    ("megatron:d2", QWEN3),
    ("megatron:d1t2", QWEN2),
    ("megatron:d1p2", QWEN3),
    ("megatron:d1c2", QWEN3),
    ("megatron:d2e2", MOE),
    ("megatron:d2t2", QWEN3),
    ("megatron:d1t2p2", QWEN2),
    ("megatron:d1p2c2", QWEN3),
    ("megatron:d2t2e2", MOE),
}
DENSE_LAYOUTS = (
    *("d1", "d2", "d3", "d4", "d1t2", "d1t4", "d1p2", "d1p4", "d1c2", "d1c4"),
    *("d2t2", "d2p2", "d2c2", "d1t2p2", "d1t2c2", "d1p2c2"),
)
EXPERT_LAYOUTS = (
    *("d2e2", "d4e4", "d4e2", "d1t2e2", "d1t4e2", "d1t4e4", "d1c2e2", "d1c4e2", "d1c4e4", "d2t2e2", "d2t2e4"),
    *("d2p2e2", "d2c2e2", "d2c2e4", "d1t2c2e2", "d1t2c2e4", "d1t2p2e2", "d1p2c2e2"),
)

UNEVEN = "ProcessGroupGloo::allgather: invalid tensor size"
"""Experts that are spread and cut at once gather as many tokens as their routers chose, which gloo does not."""


def case(sizes: str, model: str, error: str = "") -> Case:
    """One of them, on shimmed processes."""
    layout = f"megatron:{sizes}"
    return Case(
        layout,
        model,
        ci=(layout, model) in CI,
        tolerance=EXPERTS if model == MOE else NEAR,
        error=error,
        prepare=megatron_shim.install,
    )


CASES = [case(sizes, model) for sizes in DENSE_LAYOUTS for model in (QWEN2, QWEN3, MOE)]
CASES += [case(sizes, MOE) for sizes in EXPERT_LAYOUTS]
CASES.append(case("(attn:d2t2|ffn:d1t2e2)", MOE, error=UNEVEN))
