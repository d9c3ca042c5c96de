"""Verifiers that do what verifiers do. In a module of its own: processes of a pool import it by name."""

from __future__ import annotations

import os
import time
from typing import Any


def length(task: dict[str, Any], output: str, episode: dict[str, Any]) -> float:
    return len(output) / task["most"]


def parts(task: dict[str, Any], output: str, episode: dict[str, Any]) -> dict[str, Any]:
    said = {"value": 0.5, "components": {"style": 1, "truth": 0}, "label": episode["status"], "critique": "fine"}
    return {**said, "confidence": 0.9, "signal": "process_reward"}


def moody(task: dict[str, Any], output: str, episode: dict[str, Any]) -> object:
    """Does what the output says."""
    if output == "die":
        os._exit(9)
    if output == "hang":
        time.sleep(60)
    if output == "raise":
        raise KeyError("quotes the secret")
    odd = {
        "nan": float("nan"),
        "text": "0.5",
        "nothing": None,
        "odd": {"value": 1, "score": 2},
        "sure": {"value": 1, "confidence": 1.5},
        "signal": {"value": 1, "signal": "rumour"},
    }
    return odd.get(output, 1.0)


NOT_A_FUNCTION = 3
