"""The optimizer's constants, the same for every backend."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Adam:
    """AdamW's constants; the learning rate comes with each step. clip: largest global gradient norm."""

    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 1.0
