"""Grants and resolutions as records."""

from __future__ import annotations

import json
from collections.abc import Sequence

from millrace.schemas.ids import Micros
from millrace.schemas.records import Completion, Grant, Resolution, ResolutionKind
from millrace.streams.dispatch.settings import Change
from millrace.streams.dispatch.state import Ticket


def grant(policy: str, ticket: Ticket, samples: Sequence[int], reward_deadline_ms: int, now: Micros) -> Grant:
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
    kind: ResolutionKind,
    policy: str,
    now: Micros,
    *,
    ticket: Ticket | None = None,
    number: int | None = None,
    seq: int | None = None,
    completion: Completion | None = None,
    deadline: int = -1,
    reason: str | None = None,
) -> Resolution:
    """The Resolution of a ticket (solicited), or of an unsolicited group with or without ticket `number`."""
    completion = completion or (ticket["done"] if ticket else None)
    return {
        "kind": kind,
        "policy": policy,
        "ticket": ticket["ticket"] if ticket else number,
        "seq": seq,
        "group": completion["group"] if completion else "",
        "prompt_id": ticket["prompt"]["id"] if ticket else None,
        "solicited": ticket is not None,
        "size": ticket["size"] if ticket else completion["size"] if completion else 0,
        "trajectories": completion["trajectories"] if completion else [],
        "tokens": completion["tokens"] if completion else [],
        "rewards": completion["rewards"] if completion else [],
        "v_head": completion["v_head"] if completion else -1,
        "v_tail": completion["v_tail"] if completion else -1,
        "min_version": ticket["min_version"] if ticket else -1,
        "deadline": ticket["deadline"] if ticket else deadline,
        "reason": reason,
        "setting": None,
        "time": now,
    }


def setting(policy: str, change: Change, decision: str | None, reason: str | None, now: Micros) -> Resolution:
    """The Resolution that says from where a setting holds."""
    return {
        **resolution("setting", policy, now, reason=reason),
        "solicited": False,
        "setting": {
            "name": change.name,
            "value": json.dumps(change.value),
            "from_seq": change.from_seq,
            "from_ticket": change.from_ticket,
            "decision": decision,
        },
    }
