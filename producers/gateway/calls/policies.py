"""The policies whose calls engines answer here: those that are served, and those that join them once they can be.

Invariants: their order is that of the settings, the gateway's own first, whenever each of them joined; nothing of how
one stands is remembered, so an engine is gone when its newest status says so or has expired."""

from __future__ import annotations

from collections.abc import Sequence

from millrace.dialects.errors import ApiError
from millrace.producers.gateway.calls.served_policy import AwaitedPolicy, ServedPolicy
from millrace.schemas.records import WorkerStatus

SERVED_STANDING = "served"


class Policies:
    """`own`: the gateway's own policy, which answers what names no other."""

    def __init__(
        self, own_policy: str, served_policies: Sequence[ServedPolicy], awaited_policies: Sequence[AwaitedPolicy]
    ) -> None:
        self.own = own_policy
        self.served = {one.policy: one for one in served_policies}
        """by name, the gateway's own first; none where upstreams answer everything"""
        self.awaited = {one.policy: one for one in awaited_policies}
        """those that are not served yet"""
        self.names = (*self.served, *self.awaited)
        """all of them, the gateway's own first"""

    def of(self, policy: str) -> ServedPolicy:
        """A policy that is served here; for one that is not any more, the gateway's own. Raises ApiError 503 for one
        that is not served yet."""
        if policy not in self.names:
            policy = self.own
        if policy in self.awaited:
            message = f"The policy {policy} is not served yet: /health says what it waits for"
            raise ApiError(503, message, type="server_error", code="policy_awaited", retry_after_s=1)
        return self.served[policy]

    def join(self, served_policy: ServedPolicy) -> None:
        """A policy that was awaited is served from now on."""
        served_policies = {**self.served, served_policy.policy: served_policy}
        self.served = {policy: served_policies[policy] for policy in self.names if policy in served_policies}
        self.awaited.pop(served_policy.policy, None)

    def standing(self) -> dict[str, str]:
        """How each of them stands now, by name: `served_policy`, or why not."""
        out = {}
        for policy in self.names:
            served_policy = self.served.get(policy)
            if served_policy is None:
                out[policy] = self.awaited[policy].why
            else:
                out[policy] = "no engine" if served_policy.fleet.is_away else SERVED_STANDING
        return out

    def observe(self, status: WorkerStatus) -> None:
        """A WorkerStatus of the workers topic: of one policy's engines, or of the own policy's where it names none."""
        policies: list[ServedPolicy | AwaitedPolicy] = [*self.served.values(), *self.awaited.values()]
        for one in policies:
            if one.policy == (status["policy"] or self.own):
                one.fleet.observe(status)
