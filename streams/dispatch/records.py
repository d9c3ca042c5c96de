"""Grants and resolutions as records."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from schemas.ids import Micros
from streams.dispatch.settings import Change

Ticket = dict[str, Any]
"""ticket, prompt (with `tries`), size, min_version, deadline, eta, granted_at, lease_until, round, done (Completion)"""


def grant(policy: str, ticket: Ticket, samples: Sequence[int], reward_deadline_ms: int, now: Micros) -> dict[str, Any]:
    """The Grant of a ticket, or of its missing samples."""
    prompt = ticket["prompt"]
    return {
        "ticket": ticket["ticket"],
        "policy": policy,
        "prompt_id": prompt["id"],
        "task": prompt["task"],
        "group_size": ticket["size"],
        "samples": list(samples),
        "round": ticket["round"],
        "min_version": ticket["min_version"],
        "deadline": ticket["deadline"],
        "lease_until": ticket["lease_until"],
        "reward_deadline_ms": reward_deadline_ms,
        "awaits": prompt["awaits"],
        "time": now,
    }


def resolution(
    kind: str,
    policy: str,
    now: Micros,
    *,
    ticket: Ticket | None = None,
    number: int | None = None,
    seq: int | None = None,
    done: Mapping[str, Any] | None = None,
    deadline: int = -1,
    reason: str | None = None,
) -> dict[str, Any]:
    """The Resolution of a ticket (solicited), or of an unsolicited group with or without ticket `number`."""
    done = done or (ticket["done"] if ticket else None) or {}
    return {
        "kind": kind,
        "policy": policy,
        "ticket": ticket["ticket"] if ticket else number,
        "seq": seq,
        "group": done.get("group", ""),
        "prompt_id": ticket["prompt"]["id"] if ticket else None,
        "solicited": ticket is not None,
        "size": ticket["size"] if ticket else done.get("size", 0),
        "trajectories": done.get("trajectories", []),
        "tokens": done.get("tokens", []),
        "rewards": done.get("rewards", []),
        "v_head": done.get("v_head", -1),
        "v_tail": done.get("v_tail", -1),
        "min_version": ticket["min_version"] if ticket else -1,
        "deadline": ticket["deadline"] if ticket else deadline,
        "reason": reason,
        "setting": None,
        "time": now,
    }


def setting(policy: str, change: Change, decision: str | None, reason: str | None, now: Micros) -> dict[str, Any]:
    """The Resolution that says from where a setting holds."""
    return resolution("setting", policy, now, reason=reason) | {
        "solicited": False,
        "setting": {
            "name": change.name,
            "value": json.dumps(change.value),
            "from_seq": change.from_seq,
            "from_ticket": change.from_ticket,
            "decision": decision,
        },
    }
