"""Evaluations as `millrace evaluate` writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from millrace.consumers.scores import mean_of, with_id

REWARDS: Sequence[Sequence[float | None]] = ((1.0, 0.0), (1.0, 1.0), (0.0, None), (None, None))


def evaluation(
    policy: str,
    entry: Mapping[str, Any],
    /,
    rewards: Sequence[Sequence[float | None]] = REWARDS,
    pass_at: Mapping[str, float] | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """A record about the version of a ledger entry. pass_at: those of `REWARDS`, unless told."""
    scores = [{"task_id": f"task-{at}", "rewards": list(one)} for at, one in enumerate(rewards)]
    mean, error = mean_of(scores)  # type: ignore[arg-type]
    said = {"id": "", "policy": policy, "version": entry["version"], "versions": [entry["version"]]}
    said |= {"digest": entry["digest"], "ledger_hash": entry["hash"].hex(), "model": "/weights/x", "agent": None}
    said |= {"engine": "in-process", "tasks": "held-out.jsonl", "tasks_digest": "a" * 64, "questions": len(scores)}
    said |= {"samples": 2, "verifier": "exact", "success": 1.0, "temperature": 1.0, "max_tokens": 16, "seed": 0}
    said |= {"mean": mean, "standard_error": error, "pass_at": pass_at or {"1": 0.5, "2": 1.0}, "unfinished": 1}
    said |= {"unjudged": sum(reward is None for one in rewards for reward in one), "scores": scores, "time": 5}
    return dict(with_id(said | fields))  # type: ignore[arg-type]
