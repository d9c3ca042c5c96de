"""Which policies seal serves, and how the groups of each are closed: asked for in `decisions`, kept in seal's state.

So every process of seal in a namespace serves the same policies by the same rules, whosever settings it was started
with. A policy is announced by the processes that belong to it.

Invariant: a policy is announced only when its topics exist, since seal writes to them from then on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

from infra.bus.base import Bus, Outgoing
from infra.config import Settings
from infra.stage import View
from infra.topics import full_name
from schemas import codec
from schemas.ids import new_id, now_micros
from streams.seal.closing import Rules, Short

SETTING = "sealing"
"""name of the setting; its value is {"short_groups": "drop" | "train" | "top-up", "patience_ms": whole milliseconds}"""
PREFIX = "p/"


def policies(view: View) -> list[str]:
    """Every policy that was announced, sorted."""
    return [key.removeprefix(PREFIX) for key in view.keys(PREFIX)]


def policy_key(policy: str) -> str:
    """The state key of a policy's terms."""
    return f"{PREFIX}{policy}"


def parse(text: str) -> dict[str, Any] | None:
    """The terms in a decision's value, None when they are none."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    if not isinstance(value, dict) or value.keys() != {"short_groups", "patience_ms"}:
        return None
    patience = value["patience_ms"]
    fit = isinstance(patience, int) and not isinstance(patience, bool) and patience > 0
    return value if fit and value["short_groups"] in get_args(Short) else None


def rules_of(terms: Mapping[str, Any], rules: Rules) -> Rules:
    """`rules` with a policy's own terms."""
    return replace(rules, short=terms["short_groups"], patience=terms["patience_ms"] * 1000)


def terms_of(settings: Settings) -> dict[str, Any]:
    """What the settings ask for."""
    return {"short_groups": settings.policy.short_groups, "patience_ms": max(1, int(settings.policy.lease_s * 1000))}


def announce(settings: Settings, bus: Bus) -> bool:
    """Ask seal to serve the configured policy by the configured rules; False when it was asked to already.

    Raises TopicError when topics of the policy are missing."""
    bus.check_topics(settings.layout.specs())
    name, wanted = settings.policy.name, terms_of(settings)
    topic = full_name(settings.namespace, "decisions")
    known = None
    for record in bus.read(topic, 0):
        decision = codec.decode_as("Decision", record.value or b"")
        if (decision["kind"], decision["policy"], decision["name"]) == ("setting", name, SETTING):
            known = parse(decision["value"]) or known
    if known == wanted:
        return False
    decision = {
        "id": new_id(),
        "kind": "setting",
        "policy": name,
        "name": SETTING,
        "value": json.dumps(wanted),
        "reason": "as its settings say",
        "author": "millrace",
        "time": now_micros(),
    }
    with bus.publisher() as publisher:
        publisher.publish(Outgoing(topic, name.encode(), codec.encode("Decision", decision))).result()
    return True
