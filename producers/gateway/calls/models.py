"""Which policy a call means by its model, and which of the policy's versions.

Invariants: a pure choice; a name with a version is that version's or nobody's, never another's; a name that is no
policy's means any version of the policy of the call's session."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from millrace.dialects.errors import ApiError
from millrace.schemas.labels import make_label, parse_label


class WantedModel(NamedTuple):
    """A policy, None: that of the session; and the one version of it that may answer, None: any."""

    policy: str | None
    version: int | None


def policy_of(policies: Collection[str], model: str) -> str | None:
    """The policy that a model's name begins with, alone or before an @."""
    if model in policies:
        return model
    return max((policy for policy in policies if model.startswith(f"{policy}@")), key=len, default=None)


def parse_model(policies: Collection[str], model: str) -> WantedModel:
    """What a call of `model` asks of a gateway that serves these policies. Raises ApiError 404 for a version that is
    none."""
    policy = policy_of(policies, model)
    if policy is None or policy == model:
        return WantedModel(policy, None)
    label = parse_label(model)
    if label is None or label[0] != policy:
        raise no_model(f"The model {model!r} names no version: write {policy} for any, or {make_label(policy, 17)}")
    return WantedModel(*label)


def no_version(policy: str, version: int, versions: Iterable[int]) -> ApiError:
    """Nobody serves this version; `versions` are those that somebody does."""
    labels = ", ".join(make_label(policy, number) for number in sorted(versions))
    return no_model(f"No engine serves the model {make_label(policy, version)!r} now; served are {labels}")


def no_model(message: str) -> ApiError:
    """There is no such model."""
    return ApiError(404, message, param="model", code="model_not_found")
