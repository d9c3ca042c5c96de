"""Which policy a call means by its model, and which of the policy's versions.

Invariants: a pure choice; a name with a version is that version's or nobody's, never another's; a name that is no
policy's means the gateway's own, any version of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from millrace.producers.gateway.errors import ApiError
from millrace.schemas.labels import make_label, parse_label


class Wanted(NamedTuple):
    """A policy, and the one version of it that may answer; None: any."""

    policy: str
    version: int | None


def wanted(policy: str, model: str) -> Wanted:
    """What a call of `model` asks of a gateway whose policy this is. Raises ApiError 404 for a version that is none."""
    if not model.startswith(f"{policy}@"):
        return Wanted(policy, None)
    named = parse_label(model)
    if named is None or named[0] != policy:
        raise not_found(f"The model {model!r} names no version: write {policy} for any, or {make_label(policy, 17)}")
    return Wanted(*named)


def away(policy: str, version: int, served: Iterable[int]) -> ApiError:
    """Nobody serves this version; `served` are those that somebody does."""
    others = ", ".join(make_label(policy, other) for other in sorted(served))
    return not_found(f"No engine serves the model {make_label(policy, version)!r} now; served are {others}")


def not_found(message: str) -> ApiError:
    """There is no such model."""
    return ApiError(404, message, param="model", code="model_not_found")
