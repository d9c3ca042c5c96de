"""What a tenant allows: pure rules from the settings, default deny.

Invariants: a tenant without a rule (of its own or the rule named `default`) is recorded and never trained on; every
decision names the rule that made it; labels can only take permissions away."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from infra.config import Governance, Tenant

DEFAULT = "default"
NO_TRAINING = frozenset({"no-train", "no_train", "opt-out", "audit-only"})
"""labels that take content out of training"""
TRAINING_SCOPE = "train"
"""when a trajectory states scopes at all, this one must be among them"""


class Verdict(NamedTuple):
    """What an event's content may be used for, before anything is known about the content itself."""

    eligibility: str
    reason: str
    classification: str
    residency: str | None
    redact: bool


class Tenancy:
    """The rules of one deployment."""

    def __init__(self, rules: Governance) -> None:
        self._rules = rules
        self.version = hashlib.sha256(rules.model_dump_json().encode()).hexdigest()[:16]

    def decide(self, tenant: str, split: str, labels: Mapping[str, Any] | None) -> Verdict:
        """The verdict for an event of a tenant; `labels` is the newest SecurityLabels of its trajectory."""
        known = labels or {}
        named = tenant if tenant in self._rules.tenants else DEFAULT
        rule = self._rules.tenants.get(named)
        if rule is None:
            return Verdict("audit_only", "unknown_tenant", known.get("classification", "restricted"), None, True)
        classification = known.get("classification") or rule.classification
        eligibility, reason = self._judge(rule, named, split, known, classification)
        return Verdict(eligibility, reason, classification, rule.residency or None, rule.redact)

    def _judge(
        self, rule: Tenant, named: str, split: str, known: Mapping[str, Any], classification: str
    ) -> tuple[str, str]:
        labels: Sequence[str] = known.get("labels", ())
        scopes: Sequence[str] = known.get("scopes", ())
        if rule.eligibility in ("denied", "audit_only"):
            return rule.eligibility, f"tenant:{named}"
        if rule.residency and rule.residency != self._rules.region:
            return "audit_only", "residency"
        if NO_TRAINING.intersection(labels):
            return "audit_only", "label"
        if scopes and TRAINING_SCOPE not in scopes:
            return "audit_only", "consent"
        if classification == "restricted":
            return "audit_only", "classification"
        if not rule.train and split == "train":
            return "audit_only", f"tenant:{named}"
        return rule.eligibility, f"tenant:{named}"
