"""What a learner does before it loads torch: it refuses to differ from the learners that run, and lets them finish the
version they are at.

To load torch and the model's code takes seconds of processor. Where a machine has few cores, they would come out of
the step of those who go on after a learner died, and delay the very version that is waited for. Invariant: nothing here
joins the group, so what waits here costs the others nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from millrace.consumers import policy_names
from millrace.consumers.learner.group.agreement import address
from millrace.consumers.learner.group.identity import differing, identify, shown_by
from millrace.consumers.learner.group.membership import refuses
from millrace.infra.config import Settings
from millrace.infra.errors import RefusedMember
from millrace.infra.log.base import Bus
from millrace.infra.log.history import newest
from millrace.infra.log.newest import newest_first
from millrace.infra.log.readable import readable
from millrace.schemas.records import Resolution

LONGEST_S = 3.0
"""that a start waits for a version of others"""
LOOK_S = 0.25
"""between two looks at the newest version"""


def check_peers(settings: Settings, bus: Bus) -> int:
    """How many live learners the policy has. Raises RefusedMember where this one differs from them, before joining
    costs them a rebalance."""
    mine = identify(settings).shown
    members = bus.group(policy_names.group(settings)).members
    others = [shown_by(member.client_id) for member in members if not refuses(*address(member.client_id))]
    wrong = differing([*others, mine], "").get(len(others))
    if others and wrong:
        raise RefusedMember(
            f"the learners of {settings.policy.name} that are running differ from this one in {wrong}: "
            "make it equal or stop them, then start it again"
        )
    return len(others)


def let_commit(
    settings: Settings,
    bus: Bus,
    stopping: Callable[[], bool],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return when no version is due: no whole batch is ready, or the others have committed it. Not later than after
    `LONGEST_S`, or when asked to stop."""
    names = policy_names.topics(settings)
    before, deadline = newest.head(bus, names["weights"], names["ledger"]), clock() + LONGEST_S
    now = before
    while now is not None and before is not None and now.version == before.version:
        due = _ready(bus, names["resolutions"]) - now.seq_hi >= settings.policy.batch
        if not due or stopping() or clock() >= deadline:
            return
        sleep(LOOK_S)
        now = newest.head(bus, names["weights"], names["ledger"])


def _ready(bus: Bus, resolutions: str) -> int:
    """One past the newest ready group."""
    for record in newest_first(bus, resolutions):
        resolution = readable(Resolution, record)
        if resolution is not None and resolution["kind"] == "ready" and resolution["seq"] is not None:
            return resolution["seq"] + 1
    return 0
