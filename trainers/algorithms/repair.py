"""Off-policy repair: weights and masks from the gap between the policy that trains and the one that sampled.

    d_t = prox_t - behav_t             what is not finite counts as 0
    w_t = exp(d_t)                     multiplies the loss, so that the step is unbiased

    metric     ratio exp(d), k1 d, k2 d^2/2, k3 exp(-d) - 1 + d, or binary_kl max(KL(P,B), KL(B,P)) of "this token"
    level      of what is compared: token; or sequence: the metric's mean, sum or max over the sample, a ratio's in log
               space
    weights    of w: token, or sequence: exp of the mean, sum or max of d over the sample, at each of its tokens. Where
               it is left out: as level of a ratio, tokens otherwise
    action     mask: outside [lower, upper] a token (or sample) pulls no more; clamp: its weight is brought inside

Where the gap comes from, and TIS: https://fengyao.notion.site/off-policy-rl; IcePop: https://arxiv.org/abs/2510.18855;
KPop: https://ringtech.notion.site/kpop.

Bounds are inclusive. What is kept keeps its raw weight, so only rules on the ratio bound it: binary_kl keeps an
unlikely token however large its ratio. Denominators do not notice: `aggregation.py` counts before.

    TIS      token, clamp, ratio, upper 2
    IcePop   token, mask, ratio, 0.5 to 5
    KPop     token, mask, binary_kl, upper 2
    MIS      sequence, mask, ratio, upper 2; with weights = token only whole samples are judged, by their geometric mean
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

import torch

from millrace.trainers.algorithms import kl
from millrace.trainers.algorithms.aggregation import TokenOwners, sample_sums
from millrace.trainers.errors import BadConfiguration

CHOICES = {
    "level": ("token", "sequence"),
    "action": ("mask", "clamp"),
    "metric": ("ratio", "kl_k1", "kl_k2", "kl_k3", "binary_kl"),
    "agg": ("mean", "sum", "max"),
    "weights": (None, "token", "sequence"),
}


@dataclass(frozen=True)
class Rejection:
    """When a token's or a sample's weight is too far off, and what becomes of it."""

    level: Literal["token", "sequence"] = "token"
    action: Literal["mask", "clamp"] = "mask"
    metric: Literal["ratio", "kl_k1", "kl_k2", "kl_k3", "binary_kl"] = "ratio"
    agg: Literal["mean", "sum", "max"] = "mean"
    upper: float = 5.0
    lower: float | None = None
    weights: Literal["token", "sequence"] | None = None

    def __post_init__(self) -> None:
        for name, options in CHOICES.items():
            if getattr(self, name) not in options:
                raise BadConfiguration(
                    f"rejection {name} {getattr(self, name)!r} is none of {', '.join(filter(None, options))}"
                )
        if self.metric == "ratio" and not (self.upper > 1 and (self.lower is None or self.lower > 0)):
            raise BadConfiguration(f"a ratio is kept between a lower bound above 0 and an upper above 1, not {self}")
        if self.metric in ("kl_k2", "kl_k3", "binary_kl") and not self.upper > 0:
            raise BadConfiguration(f"{self.metric} is never negative: upper must be above 0, not {self.upper}")
        if self.action == "clamp" and self.metric != "ratio":
            raise BadConfiguration(f"clamp brings ratios inside their bounds; with {self.metric} choose action = mask")
        if self.lower is not None and (self.metric == "binary_kl" or self.lower > self.upper):
            raise BadConfiguration(f"rejection lower {self.lower} must be at most upper; binary_kl takes none")
        if self.action == "clamp" and self.weights not in (None, self.level):
            raise BadConfiguration(f"clamp bounds the weights themselves: set level = {self.weights}, or leave it")
        if self.agg != "mean" and "sequence" not in (self.level, self.weights):
            raise BadConfiguration(f"agg {self.agg} joins the tokens of a sample: set level = sequence, or leave it")

    @property
    def weight_level(self) -> str:
        """Of whom a weight is: token or sequence."""
        return self.weights or (self.level if self.metric == "ratio" else "token")

    @classmethod
    def parse(cls, value: object) -> Rejection | None:
        """From a configuration: a table of the fields, or "none"."""
        match value:
            case None | "" | "none" | False:
                return None
            case Rejection():
                return value
            case Mapping():
                names = [field.name for field in fields(cls)]
                for name in value:
                    if name not in names:
                        raise BadConfiguration(f"rejection has no {name!r}; choose from {', '.join(names)}")
                return cls(**value)
        raise BadConfiguration(f'rejection is a table with level, action, metric, upper ..., or "none"; not {value!r}')


def log_ratio(proximal: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
    """d, float[M]."""
    return torch.nan_to_num(proximal - behaviour, nan=0.0, posinf=0.0, neginf=0.0)


def repair(
    proximal: torch.Tensor, behaviour: torch.Tensor, keep: torch.Tensor, rule: Rejection | None, batch: TokenOwners
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights float[M], and `keep` less what is rejected."""
    d = log_ratio(proximal, behaviour)
    if rule is None:
        return torch.exp(d), keep
    weight = torch.exp(_at_level(rule.weight_level, d, keep, rule, batch))
    distance = _at_level(rule.level, _measure(d, behaviour, rule), keep, rule, batch)
    if rule.metric == "ratio":
        distance = torch.exp(distance)
    if rule.action == "clamp":
        return weight.clamp(rule.lower or 0.0, rule.upper), keep
    inside = distance <= rule.upper
    if rule.lower is not None:
        inside &= distance >= rule.lower
    return weight, keep * inside


def clamp_marks(
    proximal: torch.Tensor, behaviour: torch.Tensor, keep: torch.Tensor, rule: Rejection, batch: TokenOwners
) -> torch.Tensor:
    """1.0 where a rule whose action is clamp changes a token's weight, float[M]."""
    weight = torch.exp(_at_level(rule.weight_level, log_ratio(proximal, behaviour), keep, rule, batch))
    return ((weight > rule.upper) | (weight < (rule.lower or 0.0))).float()


def _measure(d: torch.Tensor, behaviour: torch.Tensor, rule: Rejection) -> torch.Tensor:
    """By token; of ratios the logarithm."""
    match rule.metric:
        case "ratio":
            return d
        case "binary_kl":
            return kl.bernoulli(behaviour + d, behaviour)
        case _:
            return kl.estimate(rule.metric.removeprefix("kl_"), d, torch.zeros_like(d))


def _at_level(
    level: str, values: torch.Tensor, keep: torch.Tensor, rule: Rejection, batch: TokenOwners
) -> torch.Tensor:
    return values if level == "token" else _by_sample(values, keep, rule.agg, batch)[batch.owners]


def _by_sample(values: torch.Tensor, keep: torch.Tensor, agg: str, batch: TokenOwners) -> torch.Tensor:
    """float[M] -> float[S] over the tokens that are kept; 0 where there are none."""
    if agg == "max":
        lowest = torch.where(keep > 0, values, -torch.inf)
        most = values.new_full((batch.samples,), -torch.inf).scatter_reduce(0, batch.owners, lowest, "amax")
        return torch.where(torch.isfinite(most), most, 0.0)
    sums = sample_sums(torch.where(keep > 0, values, 0.0), batch)
    return sums if agg == "sum" else sums / sample_sums(keep.to(values), batch).clamp(min=1)
