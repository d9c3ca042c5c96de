"""The policies whose calls engines answer here: those that are served, and those that join them once they can be.

Invariants: their order is that of the settings, the gateway's own first, whenever each of them joined; nothing of how
one stands is remembered, so an engine is gone when its newest status says so or has expired."""

from __future__ import annotations

from collections.abc import Sequence

from millrace.dialects.errors import ApiError
from millrace.producers.gateway.calls.served_policy import Awaited, Served
from millrace.schemas.records import WorkerStatus

SERVED = "served"


class Policies:
    """`own`: the gateway's own policy, which answers what names no other."""

    def __init__(self, own: str, served: Sequence[Served], awaited: Sequence[Awaited]) -> None:
        self.own = own
        self.served = {one.policy: one for one in served}
        """by name, the gateway's own first; none where upstreams answer everything"""
        self.awaited = {one.policy: one for one in awaited}
        """those that are not served yet"""
        self.names = (*self.served, *self.awaited)
        """all of them, the gateway's own first"""

    def of(self, policy: str) -> Served:
        """A policy that is served here; for one that is not any more, the gateway's own. Raises ApiError 503 for one
        that is not served yet."""
        if policy not in self.names:
            policy = self.own
        if policy in self.awaited:
            said = f"The policy {policy} is not served yet: /health says what it waits for"
            raise ApiError(503, said, type="server_error", code="policy_awaited", retry_after_s=1)
        return self.served[policy]

    def join(self, served: Served) -> None:
        """A policy that was awaited is served from now on."""
        found = {**self.served, served.policy: served}
        self.served = {policy: found[policy] for policy in self.names if policy in found}
        self.awaited.pop(served.policy, None)

    def standing(self) -> dict[str, str]:
        """How each of them stands now, by name: `served`, or why not."""
        out = {}
        for policy in self.names:
            served = self.served.get(policy)
            if served is None:
                out[policy] = self.awaited[policy].why
            else:
                out[policy] = "no engine" if served.fleet.away else SERVED
        return out

    def observe(self, status: WorkerStatus) -> None:
        """A WorkerStatus of the workers topic: of one policy's engines, or of the own policy's where it names none."""
        known: list[Served | Awaited] = [*self.served.values(), *self.awaited.values()]
        for one in known:
            if one.policy == (status["policy"] or self.own):
                one.fleet.observe(status)
