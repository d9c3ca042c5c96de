"""A learner that does not train: a spare beside whole cells, or one of too few.

Invariant: it holds no share, no weights and no place in any process group, and it keeps its membership alive, so that
the next change of the group counts it.
"""

from __future__ import annotations

import time

from millrace.consumers.learner.group.agreement import Roster
from millrace.consumers.learner.step.parts import Parts
from millrace.infra.log.history import newest

LOOK_S = 0.2
"""between two polls of the group"""
OVER_S = 2.0
"""between two looks whether the last wanted version is committed"""


def wait(parts: Parts, roster: Roster) -> bool:
    """Poll until the group changes or this process is asked to stop; True when the last wanted version is committed, so
    that nothing is left to wait for. Raises UnreachableError when the log does not answer."""
    looked = 0.0
    while not parts.stopping() and parts.membership.holds(roster):
        parts.membership.poll(LOOK_S)
        if time.monotonic() - looked > OVER_S:
            if _over(parts):
                return True
            looked = time.monotonic()
    return False


def _over(parts: Parts) -> bool:
    wanted = parts.settings.learner.max_versions
    if not wanted:
        return False
    head = newest.head(parts.bus, parts.topics["weights"], parts.topics["ledger"])
    return head is not None and head.version >= wanted
