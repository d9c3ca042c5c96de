"""What seal keeps of attempts and groups, and the pure steps between one state and the next.

Keys: `t/<tenant>/<root>` an attempt, `c/<tenant>/<root>` its calls (appended), `g/<policy>/<tenant>/<group>` a group
with at least one attempt, `z/...` the tombstone of a sealed group. An attempt is a root trajectory with its sub-agents.

Invariants: the first attempt of a sample that ended, in partition order, is the sample; nothing changes that later,
unless a top-up asks for the sample again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TRAINABLE = ("tenant_only", "aggregate")
"""eligibilities that may train: refine has already looked at whose policy it is"""
CHAIN_FLAWS = frozenset({"step_gap", "chain_broken", "split_changed", "gap"})
"""reasons of refine that taint the whole attempt, whichever event carries them"""

Attempt = dict[str, Any]
Group = dict[str, Any]


def group_key(event: Mapping[str, Any]) -> str:
    """The state key of an event's group."""
    return f"g/{event['policy']}/{event['tenant']}/{event['group']}"


def attempt_key(of: Mapping[str, Any], root: str) -> str:
    """The state key of an attempt; `of` is anything with a tenant. Tenants never see each other's ids."""
    return f"t/{of['tenant']}/{root}"


def calls_key(of: Mapping[str, Any], root: str) -> str:
    """The state key of an attempt's calls."""
    return f"c/{of['tenant']}/{root}"


def tombstone_key(group: str) -> str:
    """The state key that a sealed group leaves behind."""
    return f"z/{group[2:]}"


def attempt_of(
    event: Mapping[str, Any], body: Mapping[str, Any], place: Mapping[str, Any], trace: str | None
) -> Attempt:
    """A new attempt, from its start."""
    return {
        "policy": event["policy"],
        "tenant": event["tenant"],
        "group": event["group"],
        "trajectory": event["root_trajectory"],
        "id": event["id"],
        "sample": body["sample"],
        "attempt": event["attempt"],
        "task": body["task_id"],
        "awaits": list(body["awaits"]),
        "wait": body["reward_deadline_ms"] * 1000,
        "place": dict(place),
        "trace": trace,
        "flaw": None,
        "status": None,
        "closed": None,
        "rewards": {},
    }


def group_of(event: Mapping[str, Any], body: Mapping[str, Any]) -> Group:
    """A new group, from the start of its first attempt. A root trajectory alone is a group of one."""
    alone = body["ticket"] is None and event["group"] == event["root_trajectory"]
    return {
        "policy": event["policy"],
        "tenant": event["tenant"],
        "group": event["group"],
        "ticket": body["ticket"],
        "split": event["split"],
        "size": 1 if alone else max(1, body["group_size"]),
        "round": 0,
        "attempts": [],
        "winners": {},
        "settled": [],
        "rewards": {},
    }


def refused(group: Group, event: Mapping[str, Any], body: Mapping[str, Any]) -> str | None:
    """Why an attempt cannot belong to its group, None when it can."""
    if body["ticket"] != group["ticket"] or event["split"] != group["split"]:
        return "wrong_group"
    return None if 0 <= body["sample"] < group["size"] else "bad_sample"


def flaw_of(event: Mapping[str, Any]) -> str | None:
    """What an event's governance says against its whole attempt."""
    governance = event["governance"]
    if governance is None:
        return "ungoverned"
    if governance["reason"] in CHAIN_FLAWS:
        return str(governance["reason"])
    if event["kind"] in ("episode_started", "episode_ended") and governance["eligibility"] not in TRAINABLE:
        return str(governance["reason"])
    return "gap" if event["kind"] == "gap" else None


def call_of(event: Mapping[str, Any], body: Mapping[str, Any], policy: str, place: Mapping[str, Any]) -> dict[str, Any]:
    """What assembly needs of a model call."""
    why = None
    governance = event["governance"] or {"eligibility": "denied", "reason": "ungoverned"}
    if event["policy"] != policy:
        why = "other_policy"
    elif not body["trainable"]:
        why = body["untrainable_reason"] or "untrainable"
    elif governance["eligibility"] not in TRAINABLE:
        why = governance["reason"]
    return {
        "response": body["response_id"],
        "lineage": body["lineage"],
        "keep": body["prefix_len"],
        "prompt": body["prompt_ids"],
        "output": body["output_ids"],
        "logprobs": body["output_logprobs"],
        "versions": body["output_versions"],
        "supersedes": body["supersedes"],
        "why": why,
        "place": dict(place),
    }


def is_complete(group: Group) -> bool:
    """Whether every sample has ended and been judged, or waited for in vain."""
    return bool(len(group["settled"]) >= group["size"])


def settled(group: Group, sample: int) -> Group:
    """The group once nothing more is awaited for a sample."""
    return {**group, "settled": sorted({*group["settled"], sample})}
