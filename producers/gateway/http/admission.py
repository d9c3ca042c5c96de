"""How much enters over HTTP at once: requests of each tenant and key, and bytes of bodies; and from where.

Invariant: a tenant or a key that has too much in flight is told so and delays nobody else."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from millrace.dialects.errors import ApiError
from millrace.infra.config import is_local
from millrace.producers.gateway.http.callers import Caller
from millrace.producers.gateway.options import GatewayOptions


class RequestLimit(NamedTuple):
    """A tenant or a key, and how many of its requests there may be. `max_rate`: in a second; 0: any."""

    of: str
    name: str
    max_in_flight: int
    max_rate: float


class Intake:
    """The counts of one gateway."""

    def __init__(self, options: GatewayOptions) -> None:
        self.options = options
        self.held = 0
        """bytes of bodies"""
        self.in_flight: Counter[RequestLimit] = Counter()
        """requests of each tenant, and of each key that has a bound of its own"""
        self._rates: dict[RequestLimit, tuple[float, float]] = {}

    def enter(self, caller: Caller) -> list[RequestLimit]:
        """One request more: what it counts for. Raises ApiError 429 where one of these has too many, and counts it for
        none of them."""
        key_limits, now = caller.limits or self.options.limits.get(caller.key), time.monotonic()
        limits = [RequestLimit("tenant", caller.tenant, self.options.max_in_flight, self.options.max_rate)]
        if key_limits is not None:
            limits.append(
                RequestLimit(
                    "key", caller.key, key_limits.max_in_flight or self.options.max_in_flight, key_limits.max_rate or 0
                )
            )
        allowances: dict[RequestLimit, float] = {}
        for limit in limits:
            if self.in_flight[limit] >= limit.max_in_flight:
                raise _too_many(limit, f"more than {limit.max_in_flight} requests at once")
            if limit.max_rate:
                most = max(1.0, limit.max_rate)  # below one a second, one at a time
                had, then = self._rates.get(limit, (most, now))
                allowances[limit] = min(most, had + (now - then) * limit.max_rate)
                if allowances[limit] < 1:
                    raise _too_many(limit, f"more than {limit.max_rate:g} requests a second")
        self._rates |= {limit: (rest - 1, now) for limit, rest in allowances.items()}
        self.in_flight.update(limits)
        return limits

    def leave(self, limits: Iterable[RequestLimit]) -> None:
        """A request that counted for these is answered."""
        for limit in limits:
            self.in_flight[limit] -= 1
            if not self.in_flight[limit]:
                del self.in_flight[limit]


def check_origin(headers: Headers) -> None:
    """For a gateway without keys, which serves this machine alone: a page from elsewhere, open in a browser here, must
    not speak to it, neither directly nor under a name that its owner points here. Raises ApiError 403."""
    for name, url in (("host", f"//{headers.get('host', 'localhost')}"), ("origin", headers.get("origin"))):
        if url is None:
            continue
        try:
            local = is_local(urlsplit(url).hostname or "")
        except ValueError:
            local = False
        if not local:
            raise ApiError(
                403,
                f"A gateway without keys serves this machine alone, and the header {name} names another: "
                "set [gateway.keys]",
                code="foreign_origin",
            )


def _too_many(limit: RequestLimit, excess: str) -> ApiError:
    message = f"This {limit.of} has {excess}: try again"
    return ApiError(429, message, type="rate_limit_error", code="rate_limited", retry_after_s=1)
