"""Normalisation of rewards (over trajectories) and of advantages (over tokens).

    out_i = (x_i - mean) / (std + eps)      mean and std over the batch or over i's group, in float64

    leave-one-out mean      (S - x_i) / (n - 1)
    unbiased variance       sum (x - mean)^2 / (n - 1)

Groups: GRPO https://arxiv.org/abs/2402.03300, without the deviation https://arxiv.org/abs/2503.20783; leave-one-out:
RLOO https://arxiv.org/abs/2402.14740; over the batch: REINFORCE++ https://arxiv.org/abs/2501.03262.

Groups are those that the samples name, of whatever size: nothing is sliced. What is masked takes no part and comes out
as 0. A group of one has nothing to compare and comes out as 0 when its mean is taken; its std counts as 1. Statistics
of the batch are summed over ranks by `reduce`, which every rank calls equally often, whatever it holds; sums are exact
before they are reduced, so they do not depend on the order of the samples.

Who takes part, in every mean and deviation alike:

    a reply counts      it has a reward, and a token that may pull: neither cut off under mask_truncated, nor stale
                        altogether, nor rejected altogether by what is known before the step
    a group teaches     the rewards of its replies that count are not all equal; asked where a normalisation takes a
                        mean or a deviation of groups, and under dynamic_sampling; elsewhere the batch is compared, or a
                        critic says what a state is worth, and every group teaches
    tokens of advantage_norm    those that may pull, of replies that count, in groups that teach

All others have no influence on anybody's advantage, and an advantage of 0. So one long failure more in a group without
a success changes nothing, and what is not trained on is no baseline either. A reply that counts has its reward in its
group's statistics although some of its tokens are masked. Approximated proximal policies reject in the step, and M2PO
drops tokens of the whole batch, when advantages stand: what these leave out has been in the baseline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from millrace.trainers.errors import BadConfiguration

Level: TypeAlias = Literal["batch", "group"]
Reduce: TypeAlias = Callable[[Sequence[float]], list[float]]
"""Adds each value up over the ranks."""

LEVELS = (None, "batch", "group")
ROUNDING = 1e-12
"""Rewards that differ by less, as a share of the largest, are equal: sums of the same parts in another order."""


def alone(values: Sequence[float]) -> list[float]:
    """The `Reduce` of a single rank."""
    return list(values)


@dataclass(frozen=True)
class Norm:
    """mean_level, std_level: over what, or None to leave it out (mean 0, divisor 1)."""

    mean_level: Level | None = "batch"
    std_level: Level | None = "batch"
    mean_leave1out: bool = False
    std_unbiased: bool = True
    eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.mean_level not in LEVELS or self.std_level not in LEVELS:
            raise BadConfiguration(
                f"mean_level {self.mean_level!r} and std_level {self.std_level!r} must be batch, group or none"
            )
        if not self.eps > 0 or not math.isfinite(self.eps):
            raise BadConfiguration(f"eps {self.eps} of a normalisation must be above 0: it divides groups of equals")
        if self.mean_leave1out and self.mean_level is None:
            raise BadConfiguration("mean_leave1out needs a mean_level: batch or group")

    @property
    def by_group(self) -> bool:
        """Whether values are compared within their group."""
        return "group" in (self.mean_level, self.std_level)

    @classmethod
    def parse(cls, value: object) -> Norm | None:
        """From a configuration: a table of the fields, "group/batch" for mean and std level, or "none"."""
        match value:
            case None | "" | "none" | False:
                return None
            case Norm():
                return value
            case str() if value.count("/") == 1:
                mean, std = (_level(part) for part in value.split("/"))
                return cls(mean, std)
            case Mapping():
                return cls(**_check_table(value))
        raise BadConfiguration(
            f'a normalisation is a table, "mean/std" such as "group/batch", or "none"; not {value!r}'
        )


def _level(value: object) -> Any:
    return None if value in ("none", "", "null") else value


def _check_table(table: Mapping[str, object]) -> dict[str, Any]:
    names = [field.name for field in fields(Norm)]
    for name in table:
        if name == "group_size":
            raise BadConfiguration("a normalisation has no group_size: groups carry their own sizes; leave it out")
        if name not in names:
            raise BadConfiguration(f"a normalisation has no {name!r}; choose from {', '.join(names)}")
    return {name: _level(value) if name.endswith("_level") else value for name, value in table.items()}


def normalise(
    values: NDArray[np.float64],
    groups: Sequence[str],
    norm: Norm,
    *,
    mask: NDArray[np.bool_] | None = None,
    reduce: Reduce = alone,
) -> NDArray[np.float64]:
    """values float64[n], the group of each, mask bool[n] -> float64[n]."""
    is_counted = np.ones(len(values), bool) if mask is None else np.asarray(mask, bool)
    members = _members(groups, np.flatnonzero(is_counted))
    mean = _means(values, is_counted, members, norm, reduce)
    divisor = _divisors(values, is_counted, members, norm, reduce)
    out = np.zeros(len(values))
    out[is_counted] = ((values - mean) / divisor)[is_counted]
    return out


def differs_in_group(values: NDArray[np.float64], groups: Sequence[str]) -> NDArray[np.bool_]:
    """values float64[n], the group of each -> bool[n]: whether its group has values that differ by more than rounding.
    So no group of one."""
    out = np.zeros(len(values), bool)
    for indices in _members(groups, np.arange(len(values))):
        x = values[indices]
        out[indices] = np.ptp(x) > ROUNDING * np.abs(x).max()
    return out


_Members = list[NDArray[np.int64]]


def _members(groups: Sequence[str], chosen: NDArray[np.int64]) -> _Members:
    """The chosen indices, by group."""
    of_group: dict[str, list[int]] = {}
    for index in chosen.tolist():
        of_group.setdefault(groups[index], []).append(index)
    return [np.array(indices) for indices in of_group.values()]


def _means(
    values: NDArray[np.float64], is_counted: NDArray[np.bool_], members: _Members, norm: Norm, reduce: Reduce
) -> NDArray[np.float64]:
    mean = np.zeros(len(values))
    if norm.mean_level == "batch":
        total, count = reduce([math.fsum(values[is_counted]), float(is_counted.sum())])
        if norm.mean_leave1out:
            mean[:] = (total - values) / (count - 1) if count > 1 else values
        else:
            mean[:] = total / count if count else 0.0
    elif norm.mean_level == "group":
        for indices in members:
            x = values[indices]
            if norm.mean_leave1out:
                mean[indices] = (math.fsum(x) - x) / (len(x) - 1) if len(x) > 1 else x
            else:
                mean[indices] = x.mean()
    return mean


def _divisors(
    values: NDArray[np.float64], is_counted: NDArray[np.bool_], members: _Members, norm: Norm, reduce: Reduce
) -> NDArray[np.float64]:
    divisor = np.ones(len(values))
    if norm.std_level == "batch":
        # Two passes: the sum of squares less the square of the sum would lose what is small beside the mean.
        total, count = reduce([math.fsum(values[is_counted]), float(is_counted.sum())])
        mean = total / count if count else 0.0
        (squares,) = reduce([math.fsum((values[is_counted] - mean) ** 2)])
        divisor[:] = _std(squares, count, norm) + norm.eps
    elif norm.std_level == "group":
        for indices in members:
            x = values[indices]
            few = len(x) < 2 and norm.std_unbiased
            divisor[indices] = (1.0 if few else float(x.std(ddof=int(norm.std_unbiased)))) + norm.eps
    return divisor


def _std(squares: float, count: float, norm: Norm) -> float:
    if count == 0 or (norm.std_unbiased and count <= 1):
        return 1.0
    return math.sqrt(squares / (count - 1 if norm.std_unbiased else count))
