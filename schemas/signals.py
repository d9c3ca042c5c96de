"""What kind of evidence a reward is: what its sender may say, and a verifier of it."""

from __future__ import annotations

from typing import Literal

Signal = Literal[
    "deterministic_check",
    "task_outcome",
    "process_reward",
    "user_feedback",
    "delayed_operational",
    "judge",
    "safety",
]
"""the most trusted first"""
