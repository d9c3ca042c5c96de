"""What refine keeps of each trajectory: where its chain stands, and what taints it.

Invariants: a trajectory whose chain has a hole is flagged from there to its end and never trains; the flag, the split
and the withheld lineages never go back; this module only computes, the stage stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from infra.chain import START

Custody = dict[str, Any]
"""hash: last link; step: next step; group; split; flaw: reason or None; labels: newest SecurityLabels or None;
withheld: lineages; ended: whether its end came; seen: micros of its newest event"""


def opened(event: Mapping[str, Any]) -> Custody:
    """The state before a trajectory's first event."""
    return {
        "hash": START,
        "step": 0,
        "group": event["group"],
        "split": event["split"],
        "flaw": None,
        "labels": None,
        "withheld": [],
        "ended": False,
        "seen": 0,
    }


def followed(custody: Mapping[str, Any], event: Mapping[str, Any], now: int) -> Custody:
    """The state after an event, flagged if it does not follow."""
    flaw = custody["flaw"]
    if flaw is None:
        flaw = _flaw(custody, event)
    return {
        **custody,
        "hash": event["hash"],
        "step": event["step"] + 1,
        "flaw": flaw,
        "ended": custody["ended"] or (event["kind"] == "episode_ended"),
        "seen": now,
    }


def tainted(custody: Mapping[str, Any], lineage: str) -> Custody:
    """The state after a call of a lineage was withheld."""
    known: Sequence[str] = custody["withheld"]
    return {**custody, "withheld": [*known, lineage] if lineage not in known else list(known)}


def _flaw(custody: Mapping[str, Any], event: Mapping[str, Any]) -> str | None:
    if event["step"] != custody["step"]:
        return "step_gap"
    if event["prev_hash"] != custody["hash"]:
        return "chain_broken"
    if event["split"] != custody["split"]:
        return "split_changed"
    if event["kind"] == "gap":
        return "gap"
    return None
