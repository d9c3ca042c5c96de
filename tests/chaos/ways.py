"""The ways of weights to engines other than whole directories: their settings, and the kill points that lie on them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from tests.support.fault_points import fault_points

WAYS: Mapping[str, tuple[str, ...]] = {
    "deltas": ("delta.", "reload."),
    "broadcast": ("sender.", "transfer.", "receiver."),
    "adapters": ("adapter.",),
}
"""first words of the points that only this way passes"""
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "deltas": {"learner.anchor_every": 4},
    "broadcast": {"engine.weights": "broadcast"},
    "adapters": {"engine.kind": "vllm", "learner.lora": {"rank": 4, "publish": "adapter"}},
}
"""what turns a way on, by dotted name"""


def points_of(*ways: str) -> list[str]:
    """Every kill point of the code that lies on these ways."""
    words = tuple(word for way in ways for word in WAYS[way])
    return [name for name in every_point() if name.startswith(words)]


@cache
def every_point() -> tuple[str, ...]:
    """The kill points of the whole code."""
    return tuple(fault_points())
