"""The policy-gradient algorithms by name: what each sets apart from the defaults of `Knobs`. Any knob overrides.

Group statistics sit in reward_norm (over trajectories), where the shipped recipes of the field have them;
advantage_norm then normalises over the batch's tokens. GRPO and what is built on it leave that out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millrace.trainers.algorithms import equations as eq
from millrace.trainers.algorithms.equations import Equation
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
    """about: one sentence on what it is; when: one on when to take it; knobs: what it sets; equation: what it
    minimises then; family: its page, as `pages.py` names it."""

    about: str
    when: str
    knobs: Mapping[str, Any]
    equation: Equation
    family: str = "advantages"


GRPO: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.28, "reward_norm": FIRST}
GROUPED: dict[str, Any] = {"reward_norm": GROUP, "advantage_norm": BATCH}
DECOUPLED: dict[str, Any] = {**GRPO, "decoupled": True}

CLIPPED = (eq.RATIO, eq.CLIP)
GROUPED_REWARDS = (eq.GROUP_NORM, eq.OUTCOME_NORM)
CLAMPED = (eq.PROXIMAL_RATIO, eq.WEIGHT_CLAMPED, eq.CLIP, eq.WEIGHED_LOSS)

PRESETS: dict[str, Preset] = {
    "grpo": Preset(
        "Rewards are compared within their group, mean and standard deviation; no critic.",
        "Rewards can be checked and each prompt gets several samples. Begin here if in doubt.",
        GRPO,
        (eq.GROUP_NORM, eq.OUTCOME, *CLIPPED, eq.LOSS),
    ),
    "ppo": Preset(
        "A critic learns the value of each state; advantages are estimated against it (GAE).",
        "Episodes are long, or a prompt gets one sample; a second model, the critic, fits into memory.",
        {"critic": True, "advantage_norm": BATCH},
        (eq.DELTA, eq.GAE, eq.RETURNS, eq.TOKEN_NORM, *CLIPPED, eq.LOSS, eq.CRITIC_LOSS),
        "critic",
    ),
    "drgrpo": Preset(
        "GRPO that divides neither by the group's standard deviation nor by a sample's length.",
        "Prompts that are nearly always or nearly never solved shall not pull harder than others.",
        {"reward_norm": Norm("group", None)},
        (eq.GROUP_MEAN, eq.OUTCOME, *CLIPPED, eq.LOSS),
    ),
    "rloo": Preset(
        "Each reward less the mean of the others of its group.",
        "A prompt gets few samples: no reward is part of the baseline that it is compared with.",
        {"reward_norm": Norm("group", None, mean_leave1out=True), "advantage_norm": BATCH},
        (eq.GROUP_OTHERS, eq.OUTCOME_NORM, *CLIPPED, eq.LOSS),
    ),
    "reinforce++": Preset(
        "Raw rewards with a KL penalty on each token, normalised over the batch.",
        "A prompt gets one sample, or rewards mean the same on every prompt.",
        {"advantage_norm": BATCH, "kl_coef": 0.001, "kl_estimator": "k1"},
        (eq.KL_K1, eq.TO_GO, eq.TOKEN_NORM, *CLIPPED, eq.LOSS),
    ),
    "reinforce++-baseline": Preset(
        "REINFORCE++ with the group's mean as a baseline.",
        "As for reinforce++, where a prompt gets several samples and some prompts are harder than others.",
        {
            "reward_norm": Norm("group", None),
            "advantage_norm": BATCH,
            "kl_coef": 0.001,
            "kl_estimator": "k2",
        },
        (eq.GROUP_MEAN, eq.KL_K2, eq.TO_GO, eq.TOKEN_NORM, *CLIPPED, eq.LOSS),
    ),
    "liteppo": Preset(
        "Each reward less its group's mean, divided by the batch's standard deviation.",
        "The rewards of a group are often nearly equal, so that their own deviation is noise.",
        {"reward_norm": Norm("group", "batch"), "advantage_norm": BATCH},
        (eq.GROUP_MEAN_BATCH_STD, eq.OUTCOME_NORM, *CLIPPED, eq.LOSS),
    ),
    "dapo": Preset(
        "GRPO with a higher upper clip, a penalty on overlong replies, and without groups that teach nothing.",
        "Replies are long and may reach their limit; many prompts are always or never solved.",
        {
            **GROUPED,
            "clip_low": 0.2,
            "clip_high": 0.28,
            "max_new_tokens": 4096,
            "overlong_tokens": 512,
            "overlong_factor": 1.0,
            "dynamic_sampling": True,
        },
        (eq.UNEQUAL, eq.OVERLONG, *GROUPED_REWARDS, *CLIPPED, eq.LOSS),
    ),
    "gspo": Preset(
        "One ratio a sample, the geometric mean of its tokens' ratios.",
        "The ratio of a single token is noise: mixture-of-experts models, long replies.",
        {**GROUPED, "ratio_level": "sequence", "clip_low": 0.4},
        (*GROUPED_REWARDS, eq.SAMPLE_RATIO, eq.SAMPLE_ADVANTAGE, eq.SAMPLE_CLIP, eq.SAMPLE_LOSS),
        "ratios",
    ),
    "sapo": Preset(
        "A smooth gate on the ratio instead of a clip.",
        "A hard clip silences too many tokens: the metric `clipped` stays high.",
        {**GROUPED, "objective": "sapo", "sapo_tau_pos": 1.0, "sapo_tau_neg": 1.05},
        (*GROUPED_REWARDS, eq.RATIO, eq.STEEPNESS, eq.GATE, eq.LOSS),
        "ratios",
    ),
    "cispo": Preset(
        "REINFORCE weighed by a bounded ratio: no token's gradient is dropped.",
        "Rare tokens that open a line of thought would be clipped away.",
        {**GROUPED, "objective": "cispo", "clip_low": 1.0, "clip_high": 4.0},
        (*GROUPED_REWARDS, eq.RATIO, eq.BOUNDED, eq.LOSS),
        "ratios",
    ),
    "m2po": Preset(
        "The tokens that are furthest from the policy are left out until the second moment is small.",
        "Samples are many versions old.",
        {**GROUPED, "clip_high": 0.28, "decoupled": True, "m2_threshold": 0.04},
        (*GROUPED_REWARDS, eq.PROXIMAL_RATIO, eq.WEIGHT, eq.SECOND_MOMENT, eq.CLIP, eq.MASKED_LOSS),
        "off-policy",
    ),
    "decoupled": Preset(
        "GRPO clipped around the recomputed proximal policy, weighed by its ratio to the sampling one, up to 2.",
        "Samples come from versions before the one that trains: `[policy] eta` is 1 or more.",
        {**DECOUPLED, "rejection": TIS},
        (eq.GROUP_NORM, eq.OUTCOME, *CLAMPED),
        "off-policy",
    ),
    "decoupled-loglinear": Preset(
        "The same with the proximal policy interpolated by version instead of recomputed.",
        "As for decoupled, where one more forward pass a batch costs too much.",
        {**DECOUPLED, "rejection": TIS, "proximal": "loglinear"},
        (eq.GROUP_NORM, eq.OUTCOME, eq.SHARE, eq.INTERPOLATED, *CLAMPED),
        "off-policy",
    ),
    "tis": Preset(
        "Truncated importance sampling between the engine's policy and the trainer's.",
        "The engine's numbers differ from the trainer's: quantised weights, other kernels.",
        {**GROUPED, "clip_high": 0.28, "decoupled": True, "rejection": TIS},
        (*GROUPED_REWARDS, *CLAMPED),
        "off-policy",
    ),
    "icepop": Preset(
        "Tokens whose ratio between trainer and engine leaves [0.5, 5] do not pull.",
        "A mixture-of-experts model routes tokens otherwise in the engine than in the trainer.",
        {**GROUPED, "clip_high": 0.28, "decoupled": True, "rejection": ICEPOP},
        (*GROUPED_REWARDS, eq.PROXIMAL_RATIO, eq.WEIGHT, eq.INSIDE, eq.CLIP, eq.MASKED_LOSS),
        "off-policy",
    ),
    "kpop": Preset(
        "Tokens whose Bernoulli KL between trainer and engine is above 2 do not pull.",
        "As for icepop, where engine and trainer drift further apart in training.",
        {**GROUPED, "clip_high": 0.28, "decoupled": True, "rejection": KPOP},
        (*GROUPED_REWARDS, eq.PROXIMAL_RATIO, eq.WEIGHT, eq.BERNOULLI, eq.NEAR, eq.CLIP, eq.MASKED_LOSS),
        "off-policy",
    ),
    "distill-on-policy": Preset(
        "GRPO that also pulls the student's own samples towards a teacher.",
        "A stronger model with the same vocabulary is at hand, and rewards are rare.",
        {**GRPO, "rl_coef": 1.0, "teacher_coef": 0.005},
        (eq.GROUP_NORM, eq.OUTCOME, *CLIPPED, eq.TAUGHT, eq.TAUGHT_LOSS),
        "distillation",
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
