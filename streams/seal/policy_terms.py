"""Which policies seal serves, and how the groups of each are closed: asked for in `decisions`, kept in seal's state.

So every process of seal in a namespace serves the same policies by the same rules, whosever settings it was started
with. A policy is announced by the processes that belong to it.

Invariant: a policy is announced only when its topics exist, since seal writes to them from then on."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TypedDict, cast, get_args

from millrace.infra.config import Settings
from millrace.infra.errors import PolicyError
from millrace.infra.log.base import Bus
from millrace.infra.log.topics import full_name
from millrace.infra.stages.base import Key, Table, View
from millrace.infra.stages.decisions import outgoing, setting, settings_of
from millrace.schemas import bounds
from millrace.schemas.ids import now_micros
from millrace.streams.seal.group_outcome import ClosingRules, ShortPolicy

SETTING = "sealing"
"""name of the setting; its value is {"short_groups": "drop" | "train" | "top-up", "patience_ms": whole milliseconds}"""


class PolicyTerms(TypedDict):
    """How the groups of a policy are closed."""

    short_groups: ShortPolicy
    patience_ms: int


POLICIES = Table[PolicyTerms]("p/")


def policies(view: View) -> list[str]:
    """Every policy that was announced, sorted."""
    return [key.removeprefix(POLICIES.prefix) for key in POLICIES.keys(view)]


def policy_key(policy: str) -> Key[PolicyTerms]:
    """The state key of a policy's terms."""
    return POLICIES.key(policy)


def parse(text: str) -> PolicyTerms | None:
    """The terms in a decision's value, None when they are none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or value.keys() != {"short_groups", "patience_ms"}:
        return None
    patience = value["patience_ms"]
    fit = isinstance(patience, int) and not isinstance(patience, bool) and 0 < patience <= bounds.WAIT_MS
    return cast(PolicyTerms, value) if fit and value["short_groups"] in get_args(ShortPolicy) else None


def rules_of(terms: PolicyTerms, rules: ClosingRules) -> ClosingRules:
    """`rules` with a policy's own terms."""
    return replace(rules, short_policy=terms["short_groups"], patience=terms["patience_ms"] * 1000)


def terms_of(settings: Settings) -> PolicyTerms:
    """What the settings ask for."""
    return {"short_groups": settings.policy.short_groups, "patience_ms": max(1, int(settings.policy.lease_s * 1000))}


def announce(settings: Settings, bus: Bus) -> bool:
    """Ask seal to serve the configured policy by the configured rules; False when it was asked to already.

    Raises TopicError when topics of the policy are missing."""
    bus.check_topics(settings.layout.specs())
    name, terms = settings.policy.name, terms_of(settings)
    topic = full_name(settings.namespace, "decisions")
    if _newest_terms(settings, bus) == terms:
        return False
    with bus.publisher() as publisher:
        publisher.publish(outgoing(topic, setting(name, SETTING, terms, now_micros()))).result()
    return True


def check_announcement(settings: Settings, bus: Bus) -> None:
    """Raises PolicyError where seal was not asked to serve the configured policy: it would refuse all of its events."""
    if _newest_terms(settings, bus) is None:
        name = settings.policy.name
        raise PolicyError(f"there is no policy {name} here: create it with `millrace policy create --model DIR` first")


def _newest_terms(settings: Settings, bus: Bus) -> PolicyTerms | None:
    """The newest terms of the configured policy in the log."""
    terms = None
    for decision in settings_of(bus, settings.namespace, settings.policy.name):
        if decision["name"] == SETTING:
            terms = parse(decision["value"]) or terms
    return terms
