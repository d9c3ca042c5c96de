"""What refine keeps of each trajectory: where its chain stands, and what taints it.

Invariants: a trajectory whose chain has a hole is flagged from there to its end and never trains; the flag, the split
and the withheld lineages never go back; this module only computes, the stage stores."""

from __future__ import annotations

from collections.abc import Collection
from typing import NotRequired, TypedDict

from millrace.schemas.chain import START
from millrace.schemas.records import Event, ModelCall, SecurityLabels, Split
from millrace.streams.refine.personal import MOST_FIELDS


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
    """lineages that hold a call that was withheld, and events of withheld calls that a later request may go on from"""
    ended: bool
    """whether its end came"""
    seen: int
    """micros of its newest event"""
    personal: NotRequired[list[str]]
    """fields that schemas of its tools marked as personal, where there are any"""


def begin(event: Event) -> Custody:
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


def follow(custody: Custody, event: Event, now: int) -> Custody:
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


def taint(custody: Custody, event: str, call: ModelCall, came: ModelCall) -> Custody:
    """The state after the call of an event was withheld; `came` is the call before it was governed."""
    lineages = custody["withheld"]
    tokens = came["prompt_ids"]["data"] or came["output_ids"]["data"]
    additions = [event, call["lineage"]] if tokens else [event]  # no call keeps a token of a lineage that has none
    return {**custody, "withheld": [*lineages, *(name for name in additions if name not in lineages)]}


def mark(custody: Custody, fields: Collection[str]) -> Custody:
    """The state after schemas marked fields as personal."""
    known = custody.get("personal", [])
    additions = sorted(set(fields).difference(known))
    return {**custody, "personal": [*known, *additions][:MOST_FIELDS]} if additions else custody


def holds_withheld(custody: Custody, call: ModelCall) -> bool:
    """Whether a call goes on from what was withheld: its tokens, or what its request leaves out."""
    return call["lineage"] in custody["withheld"] or call["request_base"] in custody["withheld"]


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
