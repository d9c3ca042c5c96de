"""What may be learned from at all, whatever was asked for.

Invariants: evaluation traffic never trains; nor does content of a tenant whose rules of today deny it for the policy
that is the source or for the branch; nor a sample of which a model call was denied, kept for audit only or withheld
with tokens in it, or cannot be read any more, so that nothing says what was decided about it. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from millrace.consumers.history.rows import Row
from millrace.infra.config import Settings
from millrace.schemas.errors import SchemaError
from millrace.schemas.records import Event, ModelCall, Split, Trajectory
from millrace.streams.refine.tenancy import Tenancy

EVALUATION = "evaluation traffic"
TENANT = "the rules of its tenant do not let it train"
CALLS = "a model call in it may not train"
GONE = "its model calls cannot be read any more, so nothing says whether it may train"
BARRED = frozenset({"denied", "audit_only"})

Allowed = Callable[[str, Split], bool]
"""whether the rules of today let content of a tenant and split train"""


def today(settings: Settings, branch: str) -> Allowed:
    """The rules that these settings hold, for their policy and for a branch of it, which has the same owner."""
    policy = settings.policy
    both = (policy.name, branch)
    tenancy = Tenancy(settings.governance, dict.fromkeys(both, policy.tenant) if policy.tenant else {})

    def allowed(tenant: str, split: Split) -> bool:
        return all(tenancy.decide(tenant, name, split, None).eligibility not in BARRED for name in both)

    return allowed


def problem(
    sample: Trajectory, calls: Sequence[Row[Event] | None], allowed: Allowed, owner: str, *, evaluation: bool = False
) -> str | None:
    """Why a sample may not be learned from; None where it may. calls: of its `events`, None where one cannot be read;
    owner: the tenant of the policy; evaluation: it lies among the evaluations."""
    if evaluation or sample["split"] != "train":
        return EVALUATION
    if not allowed(sample["tenant"], sample["split"]):
        return TENANT
    for call in calls:
        if call is None:
            return GONE
        try:
            if _barred(call, owner):
                return CALLS
        except SchemaError:
            return GONE
    return None


def _barred(call: Row[Event], owner: str) -> bool:
    """Whether a model call bars its sample. One that was kept for audit alone is harmless where it holds no token."""
    governance = call["governance"]
    if governance is None or governance["eligibility"] == "denied":
        return True
    others = governance["eligibility"] == "tenant_only" and call["tenant"] != owner
    if governance["eligibility"] not in BARRED and governance["redaction"] != "failed" and not others:
        return False
    body: ModelCall = call.body
    return bool(body["prompt_ids"]["data"] or body["output_ids"]["data"])
