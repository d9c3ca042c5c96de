"""What the rules of a tenant say today about its history. Pure."""

from __future__ import annotations

from millrace.formats.clearance import TenantRules
from millrace.infra.config import Settings
from millrace.schemas.records import Split
from millrace.streams.refine.tenancy import Tenancy


def today(settings: Settings, *branches: str) -> TenantRules:
    """What the settings of this call say about tenants, for the configured policy and for branches of it, which have
    the same owner."""
    policy = settings.policy
    names = (policy.name, *branches)
    tenancy = Tenancy(settings.governance, dict.fromkeys(names, policy.tenant) if policy.tenant else {})

    def refusal(tenant: str, split: Split) -> str | None:
        for verdict in (tenancy.decide(tenant, name, split, None) for name in names):
            if verdict.eligibility in ("denied", "audit_only"):
                return f"{verdict.eligibility} today: {verdict.reason}"
        return None

    return refusal
