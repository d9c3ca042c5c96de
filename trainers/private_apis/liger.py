"""liger-kernel: which models it knows."""

from __future__ import annotations

from importlib import import_module


def knows(kind: str) -> bool:
    """Whether it has kernels for models of this `model_type`."""
    return kind in import_module("liger_kernel.transformers.monkey_patch").MODEL_TYPE_TO_APPLY_LIGER_FN
