"""The policy-gradient algorithms by name: what each sets apart from the defaults of `Knobs`. Knobs override them.

Group statistics sit in reward_norm (over trajectories), where the shipped recipes of the field have them;
advantage_norm then normalises over the batch's tokens. GRPO and what is built on it leave that out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millrace.trainers.algorithms.normalisation import Norm
from millrace.trainers.algorithms.repair import Rejection

GROUP = Norm("group", "group")
BATCH = Norm("batch", "batch")
FIRST = Norm("group", "group", eps=1e-4)

TIS = Rejection("token", "clamp", "ratio", upper=2.0)
ICEPOP = Rejection("token", "mask", "ratio", upper=5.0, lower=0.5)
KPOP = Rejection("token", "mask", "binary_kl", upper=2.0)


@dataclass(frozen=True)
class Preset:
    """about: one sentence on what the algorithm is; knobs: what it sets."""

    about: str
    knobs: Mapping[str, Any]


GRPO: dict[str, object] = {"clip_low": 0.2, "clip_high": 0.28, "reward_norm": FIRST}
GROUP_NORMS: dict[str, object] = {"reward_norm": GROUP, "advantage_norm": BATCH}
DECOUPLED_GRPO: dict[str, object] = {**GRPO, "decoupled": True}

PRESETS: dict[str, Preset] = {
    "grpo": Preset("Rewards are compared within their group, mean and standard deviation; no critic.", GRPO),
    "ppo": Preset(
        "A critic learns the value of each state; advantages are estimated against it (GAE).",
        {"critic": True, "advantage_norm": BATCH},
    ),
    "drgrpo": Preset(
        "GRPO that divides neither by the group's standard deviation nor by a sample's length.",
        {"reward_norm": Norm("group", None)},
    ),
    "rloo": Preset(
        "Each reward less the mean of the others of its group.",
        {"reward_norm": Norm("group", None, mean_leave1out=True), "advantage_norm": BATCH},
    ),
    "reinforce++": Preset(
        "Raw rewards with a KL penalty on each token, normalised over the batch.",
        {"advantage_norm": BATCH, "kl_coef": 0.001, "kl_estimator": "k1"},
    ),
    "reinforce++-baseline": Preset(
        "REINFORCE++ with the group's mean as a baseline.",
        {
            "reward_norm": Norm("group", None),
            "advantage_norm": BATCH,
            "kl_coef": 0.001,
            "kl_estimator": "k2",
        },
    ),
    "liteppo": Preset(
        "Each reward less its group's mean, divided by the batch's standard deviation.",
        {"reward_norm": Norm("group", "batch"), "advantage_norm": BATCH},
    ),
    "dapo": Preset(
        "GRPO with a higher upper clip, a penalty on overlong replies, and without groups that teach nothing.",
        {
            **GROUP_NORMS,
            "clip_low": 0.2,
            "clip_high": 0.28,
            "max_new_tokens": 4096,
            "overlong_tokens": 512,
            "overlong_factor": 1.0,
            "dynamic_sampling": True,
        },
    ),
    "gspo": Preset(
        "One ratio a sample, the geometric mean of its tokens' ratios.",
        {**GROUP_NORMS, "ratio_level": "sequence", "clip_low": 0.4},
    ),
    "sapo": Preset(
        "A smooth gate on the ratio instead of a clip.",
        {**GROUP_NORMS, "objective": "sapo", "sapo_tau_pos": 1.0, "sapo_tau_neg": 1.05},
    ),
    "cispo": Preset(
        "REINFORCE weighed by a bounded ratio: no token's gradient is dropped.",
        {**GROUP_NORMS, "objective": "cispo", "clip_low": 1.0, "clip_high": 4.0},
    ),
    "gmpo": Preset(
        "The geometric mean of a sample's ratios, each clipped by itself and wider.",
        {
            "reward_norm": GROUP,
            "objective": "gmpo",
            "clip_low": 0.4,
            "clip_high": 0.4,
            "aggregation": "sequence",
        },
    ),
    "m2po": Preset(
        "The tokens that are furthest from the policy are left out until the second moment is small.",
        {**GROUP_NORMS, "clip_high": 0.28, "decoupled": True, "m2_threshold": 0.04},
    ),
    "decoupled": Preset(
        "GRPO clipped around the recomputed proximal policy, weighed by its ratio to the sampling one, up to 2.",
        {**DECOUPLED_GRPO, "rejection": TIS},
    ),
    "decoupled-loglinear": Preset(
        "The same with the proximal policy interpolated by version instead of recomputed.",
        {**DECOUPLED_GRPO, "rejection": TIS, "proximal": "loglinear"},
    ),
    "tis": Preset(
        "Truncated importance sampling between the engine's policy and the trainer's.",
        {**GROUP_NORMS, "clip_high": 0.28, "decoupled": True, "rejection": TIS},
    ),
    "icepop": Preset(
        "Tokens whose ratio between trainer and engine leaves [0.5, 5] do not pull.",
        {**GROUP_NORMS, "clip_high": 0.28, "decoupled": True, "rejection": ICEPOP},
    ),
    "kpop": Preset(
        "Tokens whose Bernoulli KL between trainer and engine is above 2 do not pull.",
        {**GROUP_NORMS, "clip_high": 0.28, "decoupled": True, "rejection": KPOP},
    ),
    "distill-on-policy": Preset(
        "GRPO that also pulls the student's own samples towards a teacher.",
        {**GRPO, "rl_coef": 1.0, "teacher_coef": 0.005},
    ),
}

ALIASES = {
    "dr.grpo": "drgrpo",
    "dr_grpo": "drgrpo",
    "reinforce_plus_plus": "reinforce++",
    "reinforce_plus_plus_baseline": "reinforce++-baseline",
    "reinforce++_baseline": "reinforce++-baseline",
    "lite_ppo": "liteppo",
}
"""Other spellings of names above."""
