"""Which call goes where, by the name of its model: to a policy's own engines, or to an upstream.

Invariants: a pure choice; a policy's own name is always its engines', where there are any; the first rule that fits
decides whose upstream speaks the call's API, and where there is none, the first whose upstream can be reached in
another; what no rule fits goes to the engines, where
there are any, and is refused otherwise, as is a model that only other APIs are asked for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from millrace.dialects.errors import ApiError, bad_request
from millrace.producers.gateway.calls.models import policy_of
from millrace.producers.gateway.prices import Prices
from millrace.schemas import bounds


@dataclass(frozen=True, slots=True)
class RouteRule:
    """Models whose name fits `model`, in which each * stands for any text, are answered by an upstream, which is asked
    for `send_as` where that is said."""

    model: str
    upstream: str
    send_as: str = ""
    prices: Prices | None = None


def fits(pattern: str, model: str) -> bool:
    """Whether a model's name is one that the pattern means."""
    first, *parts = pattern.split("*")
    if not parts:
        return model == pattern
    if not model.startswith(first):
        return False
    *middle, last = parts
    at = len(first)
    for part in middle:  # the first place is the best: what comes later has the more room
        place = model.find(part, at)
        if place < 0:
            return False
        at = place + len(part)
    return len(model) - len(last) >= at and model.endswith(last)


def choose(
    rules: Sequence[RouteRule],
    speaks: Callable[[str, str], bool],
    policies: Collection[str] | None,
    model: str,
    dialect: str,
    *,
    reaches: Callable[[str, str], bool] | None = None,
) -> RouteRule | None:
    """The rule for a call; None: engines of `policies` answer it. They are None where there are no engines. `speaks`
    says whether an upstream speaks a dialect, `reaches` whether calls in it can be translated for it. Raises ApiError
    404, and 400 for a name too long."""
    if len(model) > bounds.NAME_BYTES:
        raise bad_request(f"model: A name is longer than {bounds.NAME_BYTES} bytes", param="model")
    if policies is not None and policy_of(policies, model) is not None:
        return None
    fitting = [rule for rule in rules if fits(rule.model, model)]
    for can_reach in filter(None, (speaks, reaches)):
        for rule in fitting:
            if can_reach(rule.upstream, dialect):
                return rule
    if fitting:
        raise api_refusal(model, sorted({rule.upstream for rule in fitting}), dialect)
    if policies is None:
        raise ApiError(404, f"No upstream answers the model {model!r}", param="model", code="model_not_found")
    return None


def api_refusal(model: str, upstreams: Sequence[str], api: str) -> ApiError:
    """The refusal of an API that nobody speaks who answers a model."""
    message = f"The model {model!r} is answered by {', '.join(upstreams)}, which speaks another API than {api}"
    return ApiError(404, message, param="model", code="model_not_found")


def chain(upstream: str, fallbacks: Mapping[str, str], speaks: Callable[[str], bool]) -> list[str]:
    """The upstream and those behind it, in the order in which they are asked: none twice, and only such as speak the
    call's API."""
    out: list[str] = []
    while upstream and upstream not in out:
        out.append(upstream)
        upstream = fallbacks.get(upstream, "")
    return [name for name in out if speaks(name)]


def exact(rules: Sequence[RouteRule]) -> list[str]:
    """The models that rules name in full."""
    return list(dict.fromkeys(rule.model for rule in rules if "*" not in rule.model))
