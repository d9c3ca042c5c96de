"""An adapter (LoRA) as data: what is adapted, and the weights that learn. `weights.lora` works on it.

This module loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from millrace.trainers.errors import BadConfiguration

if TYPE_CHECKING:
    import torch

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of a transformer block, as Hugging Face names them."""
A, B = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True, slots=True)
class Lora:
    """What to adapt: the rank, alpha, names of the linear layers; whether versions are published with the adapter
    merged into full weights, or as the adapter alone, which engines put on a base that they have."""

    rank: int = 8
    alpha: int = 16
    targets: tuple[str, ...] = TARGETS
    publish: Literal["merge", "adapter"] = "merge"

    def __post_init__(self) -> None:
        """Raises BadConfiguration for what cannot work."""
        if self.rank < 1 or self.alpha < 1 or not self.targets:
            raise BadConfiguration(
                f"an adapter needs a rank of at least 1, an alpha of at least 1 and targets, not {self.rank}, "
                f"{self.alpha} and {list(self.targets)}"
            )

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / self.rank


@dataclass(frozen=True, slots=True)
class Adapter:
    """weights[layer + A or B]: fp32; base: the directory whose weights are frozen; digest: of its weights, hex."""

    lora: Lora
    base: Path
    digest: str
    weights: Mapping[str, torch.Tensor]
