"""The names that other frameworks give to our knobs, taken as they are; names that mean nothing any more, refused.

eps_clip 0.4                     clip_low 0.4, and clip_high 0.4 unless eps_clip_higher says otherwise
use_sapo_loss, use_cispo_loss    objective; false is refused where the preset says otherwise
overlong_reward_penalty          false: overlong_tokens 0; true is refused where these are 0

Imports no torch: roles that train nothing ask here too.
"""

from __future__ import annotations

from collections.abc import Mapping

from millrace.trainers.errors import BadConfiguration

NEW_NAMES = {
    "ppo_n_minibatches": "minibatches",
    "eps_clip": "clip_low",
    "eps_clip_higher": "clip_high",
    "c_clip": "dual_clip",
    "importance_sampling_level": "ratio_level",
    "use_decoupled_loss": "decoupled",
    "recompute_logprob": "recompute",
    "prox_logp_method": "proximal",
    "rejection_sampling": "rejection",
    "reward_scaling": "reward_scale",
    "adv_norm": "advantage_norm",
    "kl_ctl": "kl_coef",
    "overlong_penalty_factor": "overlong_factor",
    "value_eps_clip": "value_clip",
    "mask_no_eos_with_zero": "mask_truncated",
    "gae_timestep_unit": "gae_unit",
    "rl_loss_weight": "rl_coef",
    "distill_loss_weight": "teacher_coef",
    "entropy_coeff": "entropy_coef",
    "dynamic_bs": "dynamic_sampling",
}
"""Theirs -> ours."""

GONE = {
    "behave_imp_weight_cap": "it is `upper` of rejection",
    "behave_imp_weight_mode": "it is rejection: disabled -> none; token_mask X -> {level token, action mask, metric "
    "ratio, upper X}; token_truncate X -> {level token, action clamp, metric ratio, upper X}; sequence_mask and "
    "sequence_truncate -> the same with level sequence",
    "behaviour_cap": "it is rejection = {level token, action clamp, metric ratio, upper X}",
    "group_adv_norm": 'it is reward_norm = "group/group"',
    "group_reward_norm": 'it is reward_norm = "group/group"',
    "group_size": "groups carry their own sizes; how many samples a prompt gets is [policy] group_size",
    "reward_normalization": 'it is reward_norm = {mean_level = "group", std_level = "group", std_unbiased = false, '
    "eps = 1e-8}",
    "drop_incomplete_group": "it is [policy] short_groups",
    "dynamic_filter_fn": "it is dynamic_sampling here, or [policy] dynamic_sampling to fill the batch again",
    "deterministic_sampling": "batches are in the order of their groups always",
    "optimizer_dtype": "weights and moments are fp32 always; [learner] precision says what layers compute in",
    "max_head_offpolicyness": "it is [policy] eta",
    "consumer_batch_size": "it is [policy] batch",
    "max_concurrent_rollouts": "it is [rollout] concurrency, of each of [rollout] workers",
    "gconfig": "sampling is the engine's business: [rollout] sampling",
}
"""Names that no longer exist, and what to write instead."""

SWITCHES: dict[str, tuple[bool, str, str | int]] = {
    "use_sapo_loss": (True, "objective", "sapo"),
    "use_cispo_loss": (True, "objective", "cispo"),
    "overlong_reward_penalty": (False, "overlong_tokens", 0),
}
"""Theirs -> the value that sets something, the knob here, and to what; the other value sets nothing."""

ABSENT = {
    "jsd": "a mixture of both KLs is not offered: take distill-forward or distill-reverse",
    "gkd": "it is distill-forward or distill-reverse, of the student's replies with `millrace distill --on-policy`",
    "opo": "a baseline that is weighed by length is not offered: take rloo, or drgrpo",
}
"""Algorithms that are not here, and what is nearest."""

PAIRS = frozenset({"dpo", "ipo", "simpo", "orpo", "reward-model"})
"""Algorithms that learn from two replies to one prompt, of which one was chosen: their groups have two samples."""

VALUES = {"proximal": {"reuse_train_logp": "reuse"}, "objective": {"geo_mean": "gmpo"}}
"""Knob here -> their values of it -> ours."""


def translate(knobs: Mapping[str, object]) -> dict[str, object]:
    """`knobs` under our names. Raises BadConfiguration for names that are gone, and where two names say one thing."""
    out: dict[str, object] = {}
    sources: dict[str, str] = {}
    for name, value in knobs.items():
        if name in GONE:
            raise BadConfiguration(f"knob {name} no longer exists: {GONE[name]}")
        for knob, setting in _translations(name, value):
            if knob in sources:
                raise BadConfiguration(f"{sources[knob]} and {name} are one knob; keep one of them")
            sources[knob] = name
            out[knob] = VALUES.get(knob, {}).get(setting, setting) if isinstance(setting, str) else setting
    if "eps_clip" in knobs and "clip_high" not in out:
        out["clip_high"] = None
    return out


def check_group_size(name: str, size: int) -> None:
    """Raises BadConfiguration where the algorithm called `name` learns from pairs, and groups have another size."""
    if name.lower() in PAIRS and size != 2:
        raise BadConfiguration(f"{name} learns from pairs, and groups of {size} are none: set [policy] group_size to 2")


def check_switches(name: str, knobs: Mapping[str, object], values: Mapping[str, object]) -> None:
    """Raises BadConfiguration for a switch among `knobs` that changed nothing and is not so in what was made of
    them."""
    for objective in ("sapo", "cispo"):
        if knobs.get(f"use_{objective}_loss") is False and values.get("objective") == objective:
            raise BadConfiguration(
                f"use_{objective}_loss is false, and {name} sets objective = {objective}: leave it out"
            )
    if knobs.get("overlong_reward_penalty") is True and not values.get("overlong_tokens"):
        raise BadConfiguration(
            "overlong_reward_penalty needs overlong_tokens: how many before max_new_tokens it begins"
        )


def _translations(name: str, value: object) -> list[tuple[str, object]]:
    if name in SWITCHES and isinstance(value, bool):
        sets, knob, setting = SWITCHES[name]
        return [(knob, setting)] if value is sets else []
    return [(NEW_NAMES.get(name, name), value)]
