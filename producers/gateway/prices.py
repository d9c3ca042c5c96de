"""What a call costs, from its tokens as who answered counted them."""

from __future__ import annotations

from typing import NamedTuple

from millrace.infra.config.upstreams import GatewayPrices

MILLION = 1_000_000
Usage = tuple[int, int, int]
"""tokens of a call: prompt, completion, and those of the prompt that were cached; 0 where nobody counted"""


class Prices(NamedTuple):
    """Of a million tokens. `cached_prompt`: those of a prompt that the upstream had read before."""

    prompt: float
    completion: float
    cached_prompt: float


def to_prices(entry: GatewayPrices | None) -> Prices | None:
    """Those of the settings."""
    if entry is None:
        return None
    return Prices(entry.prompt, entry.completion, entry.prompt if entry.cached is None else entry.cached)


def cost(prices: Prices | None, usage: Usage) -> float | None:
    """Of (prompt, completion, cached) tokens, the cached among those of the prompt. None where nobody knows: there are
    no prices, or the upstream counted nothing."""
    prompt, completion, cached_tokens = usage
    if prices is None or not (prompt or completion):
        return None
    cached_tokens = min(cached_tokens, prompt)
    prompt_cost = (prompt - cached_tokens) * prices.prompt + cached_tokens * prices.cached_prompt
    return (prompt_cost + completion * prices.completion) / MILLION
