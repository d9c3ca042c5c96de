"""Budgets of keys, and the models whose calls no price is known of, which no budget binds. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from millrace.infra.config.serving import Gateway
from millrace.infra.config.upstreams import GatewayPrices


class PricedModels(NamedTuple):
    """Models, as the settings name them: those that have prices, and those that have none."""

    priced: list[str]
    unpriced: list[str]


def prices(gateway: Gateway, policy: str, own: GatewayPrices | None) -> PricedModels:
    """Of everything that a gateway serves; `own` are those of its own `policy`, which it serves where no upstream
    stands in place of the engines."""
    found: dict[str, GatewayPrices | None] = {}
    if not gateway.upstream_url:
        found[f"{policy} ([policy] prices)"] = own
        found |= {f"{name} ([gateway.policies.{name}] prices)": one.prices for name, one in gateway.policies.items()}
    found |= {f"{one.model} ([[gateway.routes]] {at} prices)": one.prices for at, one in enumerate(gateway.routes)}
    if gateway.upstream_url:
        found["every other model ([gateway] upstream_url, which has no prices: name it by [[gateway.routes]])"] = None
    return PricedModels(_those(found, priced=True), _those(found, priced=False))


def _those(found: Mapping[str, GatewayPrices | None], *, priced: bool) -> list[str]:
    return [name for name, given in found.items() if (given is not None) == priced]


def unbound(gateway: Gateway, policy: str, own: GatewayPrices | None) -> str | None:
    """What no budget of a key binds; None where no key has one, or all models have prices."""
    keys = [name for name, key in gateway.keys.items() if key.budget is not None]
    free = prices(gateway, policy, own).unpriced
    if not keys or not free:
        return None
    whose = f"[gateway.keys.{keys[0]}] has a budget" if len(keys) == 1 else f"keys have budgets ({', '.join(keys)})"
    return f"{whose}, and these models have no prices, so their calls cost nothing: {', '.join(free)}"


def useless(gateway: Gateway, policy: str, own: GatewayPrices | None) -> str | None:
    """Why the budgets bind nothing at all; None where they bind something."""
    said = unbound(gateway, policy, own)
    if said is None or prices(gateway, policy, own).priced:
        return None
    return f"{said}. No model has a price: the budget would never bind. Set prices, or tokens_per_minute"
