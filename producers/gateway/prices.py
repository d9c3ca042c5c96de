"""What a call costs, from its tokens as who answered counted them."""

from __future__ import annotations

from typing import NamedTuple

from millrace.infra.config.upstreams import GatewayPrices

MILLION = 1_000_000
Usage = tuple[int, int, int]
"""tokens of a call: prompt, completion, and those of the prompt that were cached; 0 where nobody counted"""


class Prices(NamedTuple):
    """Of a million tokens. `cached`: those of a prompt that the upstream had read before."""

    prompt: float
    completion: float
    cached: float


def priced(told: GatewayPrices | None) -> Prices | None:
    """Those of the settings."""
    if told is None:
        return None
    return Prices(told.prompt, told.completion, told.prompt if told.cached is None else told.cached)


def cost(prices: Prices | None, usage: Usage) -> float | None:
    """Of (prompt, completion, cached) tokens, the cached among those of the prompt. None where nobody knows: there are
    no prices, or the upstream counted nothing."""
    prompt, completion, cached = usage
    if prices is None or not (prompt or completion):
        return None
    cached = min(cached, prompt)
    asked = (prompt - cached) * prices.prompt + cached * prices.cached
    return (asked + completion * prices.completion) / MILLION
