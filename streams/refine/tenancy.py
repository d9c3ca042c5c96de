"""What a tenant allows: pure rules from the settings, default deny.

Invariants: a tenant without a rule (of its own or the rule named `default`) is recorded and never trained on; what only
its own tenant's policies may learn trains no policy whose tenant is not known to be the same; every decision names the
rule that made it; labels can only take permissions away."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

import orjson

from millrace.infra.config import Governance, Tenant
from millrace.schemas.records import Eligibility, SecurityLabels

DEFAULT = "default"
NO_TRAINING = frozenset({"no-train", "no_train", "opt-out", "audit-only"})
"""labels that take content out of training"""
TRAINING_SCOPE = "train"
"""when a trajectory states scopes at all, this one must be among them"""


class ContentUse(NamedTuple):
    """What an event's content may be used for, before anything is known about the content itself."""

    eligibility: Eligibility
    reason: str
    classification: str
    residency: str | None


class Tenancy:
    """The rules of one deployment. `owners`: policy -> the tenant that it belongs to."""

    def __init__(self, rules: Governance, owners: Mapping[str, str] | None = None) -> None:
        self._rules = rules
        self._owners = dict(owners or {})
        self.version = _version(rules, self._owners)

    def redacts(self, tenant: str) -> tuple[bool, tuple[str, ...]]:
        """(whether the content of a tenant is looked into, the labelled kinds that are taken out too)."""
        rule = self._rule(tenant)
        return (True, ()) if rule is None else (rule.redact, rule.remove)

    def rule_of(self, tenant: str) -> str:
        """The name of the rule for a tenant, whether there is one or not."""
        return tenant if tenant in self._rules.tenants else DEFAULT

    def _rule(self, tenant: str) -> Tenant | None:
        return self._rules.tenants.get(self.rule_of(tenant))

    def decide(self, tenant: str, policy: str, split: str, labels: SecurityLabels | None) -> ContentUse:
        """The verdict for an event of a tenant that one policy is to learn from; `labels` is the newest SecurityLabels
        of its trajectory."""
        label = labels["classification"] if labels else None
        rule_name = self.rule_of(tenant)
        rule = self._rule(tenant)
        if rule is None:
            return ContentUse("audit_only", "unknown_tenant", "restricted" if label is None else label, None)
        classification = label or rule.classification
        eligibility, reason = self._judge(rule, rule_name, split, labels, classification)
        if eligibility == "tenant_only" and self._owners.get(policy) != tenant:
            eligibility, reason = "audit_only", "other_tenants_policy"
        return ContentUse(eligibility, reason, classification, rule.residency or None)

    def _judge(
        self, rule: Tenant, rule_name: str, split: str, newest_labels: SecurityLabels | None, classification: str
    ) -> tuple[Eligibility, str]:
        labels, scopes = (newest_labels["labels"], newest_labels["scopes"]) if newest_labels else ([], [])
        if rule.eligibility in ("denied", "audit_only"):
            return rule.eligibility, f"tenant:{rule_name}"
        if rule.residency and rule.residency != self._rules.region:
            return "audit_only", "residency"
        if NO_TRAINING.intersection(labels):
            return "audit_only", "label"
        if scopes and TRAINING_SCOPE not in scopes:
            return "audit_only", "consent"
        if classification == "restricted":
            return "audit_only", "classification"
        if not rule.train and split == "train":
            return "audit_only", f"tenant:{rule_name}"
        return rule.eligibility, f"tenant:{rule_name}"


def _version(rules: Governance, owners: Mapping[str, str]) -> str:
    """A digest of all that decides. What is not set does not count, so that a release with a new setting does not look
    like other rules."""
    content = rules.model_dump(mode="json", exclude={"name_key"})
    for tenant in content["tenants"].values():
        for setting in ("remove", "identifiers"):
            if not tenant[setting]:
                del tenant[setting]
    if owners:
        content["owners"] = dict(sorted(owners.items()))
    return hashlib.sha256(orjson.dumps(content)).hexdigest()[:16]
