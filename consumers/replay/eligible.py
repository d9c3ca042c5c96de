"""What may be learned from or judged again at all, whatever was asked for.

Invariants: evaluation traffic never trains; nor does content of a tenant whose rules of today deny it for the policy
that is the source or for the branch; nor a sample of which a model call was denied, kept for audit only or withheld
with tokens in it, or cannot be read any more, so that nothing says what was decided about it. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from millrace.dialects.dialogue import Unsayable
from millrace.formats.clearance import Allowed, cleared
from millrace.infra.log.history.rows import Row
from millrace.schemas.errors import SchemaError
from millrace.schemas.records import Event, Trajectory

EVALUATION = "evaluation traffic"
TENANT = "the rules of its tenant do not let it train"
CALLS = "a model call in it may not train"
GONE = "its model calls cannot be read any more, so nothing says whether it may train"


def problem(sample: Trajectory, calls: Sequence[Row[Event] | None], allowed: Allowed, owner: str) -> str | None:
    """Why a sample may not be learned from; None where it may. calls: of its `events`, None where one cannot be read;
    allowed: the rules of today; owner: the tenant of the policy."""
    if sample["split"] != "train":
        return EVALUATION
    if allowed(sample["tenant"], sample["split"]) is not None:
        return TENANT
    there = [call for call in calls if call is not None]
    try:
        cleared(there, owner)
    except Unsayable:
        return CALLS
    except SchemaError:
        return GONE
    return None if len(there) == len(calls) else GONE
