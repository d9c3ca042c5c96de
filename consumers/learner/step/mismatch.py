"""Members that differ never train together: each compares all of its roster before it meets anybody.

Before, since a member with another layout would count other ranks, and wait for peers that never come.
"""

from __future__ import annotations

from millrace.consumers.learner.group.agreement import Roster
from millrace.consumers.learner.group.identity import Identity, tag_differences, tag_of
from millrace.consumers.learner.step.parts import Parts
from millrace.infra.errors import RefusedMember, RegroupError
from millrace.infra.log.history import newest


def refuse(parts: Parts, roster: Roster) -> None:
    """Raises RefusedMember when this process must not train with the others, RegroupError when another must not. The
    ledger says who is right, where some member has its identity."""
    tags = [tag_of(peer.client_id) for peer in roster.members]
    if len(set(tags)) == 1:
        return
    head = newest.head(parts.bus, parts.topics["weights"], parts.topics["ledger"])
    ledger_tag = ""
    if head is not None:
        entry = head.entry
        ledger_tag = Identity(entry["config_hash"], entry["code_hash"], entry["libraries"], entry["cpu"]).tag
    wrong = tag_differences(tags, ledger_tag)
    if roster.rank in wrong:
        raise RefusedMember(
            f"learner {roster.self_peer.member_id} differs from the others in {wrong[roster.rank]}: "
            "make it equal, then start it again"
        )
    names = ", ".join(f"{roster.members[place].member_id} (its {differences})" for place, differences in wrong.items())
    raise RegroupError(f"refused {names}")
