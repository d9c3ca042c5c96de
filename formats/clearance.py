"""What of the history may be used anew, by what refine decided about each call. Pure.

Invariants: content that is denied or kept for audit only is never used, nor `tenant_only` content for a policy of
another tenant, nor anything when either is unknown; a later decision can only take permission away."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from millrace.dialects.dialogue import Unsayable
from millrace.infra.log.history.rows import Row
from millrace.schemas.errors import CorruptRecord
from millrace.schemas.records import Event, Governance, ModelCall, Split

TenantRules = Callable[[str, Split], str | None]
"""why content of a tenant and split may not be used today, None where it may"""


def anyone(tenant: str, split: Split) -> str | None:
    """No rules of today: what was decided when it came holds."""
    return None


def ineligibility(event: Row[Event], owner: str) -> str | None:
    """Why the content of an event may not be used for a policy of the tenant `owner`, None when it may."""
    governance: Governance | None = event["governance"]
    if governance is None:
        return "ungoverned"
    if governance["eligibility"] in ("denied", "audit_only"):
        return f"{governance['eligibility']}: {governance['reason']}"
    if governance["redaction"] == "failed":
        return "withheld: redaction failed"
    if governance["eligibility"] == "tenant_only" and event["tenant"] != owner:
        return "tenant_only: another tenant's policy"
    return None


def usable_calls(calls: Sequence[Row[Event]], owner: str) -> list[Row[Event]]:
    """The calls of one trajectory whose content may be used. A call that may not is left out where it holds no token,
    as refine leaves what it withholds. Raises Unsayable `ineligible` where its tokens lie among the others', or where
    any call is denied or was never governed, SchemaError for what is no model call."""
    out = []
    for call in calls:
        if call["kind"] != "model_call":
            raise CorruptRecord(f"an event of kind {call['kind']} where a model call belongs")
        why = ineligibility(call, owner)
        if why is None:
            out.append(call)
            continue
        body: ModelCall = call.body
        is_forbidden = why.startswith(("denied", "ungoverned"))
        if is_forbidden or body["prompt_ids"]["data"] or body["output_ids"]["data"]:
            raise Unsayable("ineligible", f"reply {body['response_id']} is {why}")
    return out
