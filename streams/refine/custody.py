"""What refine keeps of each trajectory: where its chain stands, and what taints it.

Invariants: a trajectory whose chain has a hole is flagged from there to its end and never trains; the flag, the split
and the withheld lineages never go back; this module only computes, the stage stores."""

from __future__ import annotations

from typing import TypedDict

from millrace.schemas.chain import START
from millrace.schemas.records import Event, SecurityLabels, Split


class Custody(TypedDict):
    """What is kept of one trajectory."""

    hash: bytes
    """the last link"""
    step: int
    """the next step"""
    group: str
    split: Split
    flaw: str | None
    """why nothing of it may train"""
    labels: SecurityLabels | None
    """the newest ones"""
    withheld: list[str]
    """lineages that hold a call that was withheld"""
    ended: bool
    """whether its end came"""
    seen: int
    """micros of its newest event"""


def opened(event: Event) -> Custody:
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


def followed(custody: Custody, event: Event, now: int) -> Custody:
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


def tainted(custody: Custody, lineage: str) -> Custody:
    """The state after a call of a lineage was withheld."""
    known = custody["withheld"]
    return {**custody, "withheld": [*known, lineage] if lineage not in known else list(known)}


def _flaw(custody: Custody, event: Event) -> str | None:
    if event["step"] != custody["step"]:
        return "step_gap"
    if event["prev_hash"] != custody["hash"]:
        return "chain_broken"
    if event["split"] != custody["split"]:
        return "split_changed"
    if event["kind"] == "gap":
        return "gap"
    return None
