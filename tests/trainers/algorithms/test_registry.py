from __future__ import annotations

from typing import Any

import pytest

from millrace.trainers.algorithms.normalisation import Norm
from millrace.trainers.algorithms.presets import ALIASES, TIS
from millrace.trainers.algorithms.registry import algorithm, names, policy
from millrace.trainers.algorithms.repair import Rejection
from millrace.trainers.algorithms.sft import Sft
from millrace.trainers.errors import BadConfiguration


def test_by_name() -> None:
    assert algorithm("grpo", clip_high=0.3) == policy("grpo", clip_high=0.3)
    assert algorithm("sft") == Sft()
    assert algorithm("GRPO") == algorithm("grpo")
    assert algorithm("Dr.GRPO") == algorithm("drgrpo")
    assert algorithm("ipo").loss_type == "ipo"  # type: ignore[attr-defined]
    for name in names():
        assert algorithm(name).minibatches >= 1
    assert set(ALIASES.values()) <= set(names())


def test_the_names_of_other_frameworks_are_taken() -> None:
    """A recipe of AReaL's, knob by knob."""
    made = policy(
        "reinforce++",
        ppo_n_minibatches=1,
        eps_clip=0.4,
        reward_scaling=10.0,
        reward_bias=-0.5,
        kl_ctl=0.0,
        recompute_logprob=True,
        use_decoupled_loss=True,
        rejection_sampling={"metric": "ratio", "upper": 5.0},
        reward_norm={"mean_level": "group", "std_level": "group"},
        adv_norm={"mean_level": "batch", "std_level": "batch"},
        importance_sampling_level="token",
        prox_logp_method="recompute",
        c_clip=3.0,
        dynamic_bs=True,
        mask_no_eos_with_zero=True,
        gae_timestep_unit="turn",
    ).knobs
    assert (made.minibatches, made.clip_low, made.high, made.dual_clip) == (1, 0.4, 0.4, 3.0)
    assert (made.reward_scale, made.reward_bias, made.kl_coef) == (10.0, -0.5, 0.0)
    assert made.decoupled
    assert made.recompute
    assert made.rejection == Rejection(upper=5.0)
    assert made.reward_norm == Norm("group", "group")
    assert (made.dynamic_sampling, made.mask_truncated, made.gae_unit) == (True, True, "turn")


def test_eps_clip_alone_is_symmetric() -> None:
    assert policy("grpo", eps_clip=0.4).knobs.high == 0.4
    assert policy("grpo", eps_clip=0.4, eps_clip_higher=0.5).knobs.high == 0.5
    assert policy("grpo", clip_low=0.1).knobs.high == 0.28, "our own names override one knob each"


def test_switches_of_other_frameworks() -> None:
    assert policy("grpo", use_sapo_loss=True).knobs.objective == "sapo"
    assert policy("grpo", use_cispo_loss=True, eps_clip=1.0, eps_clip_higher=4.0).knobs.objective == "cispo"
    assert policy("grpo", use_sapo_loss=False).knobs.objective == "clip"
    assert policy("dapo", overlong_reward_penalty=False).knobs.overlong_tokens == 0
    assert policy("grpo", overlong_reward_penalty=True, overlong_tokens=64).knobs.overlong_tokens == 64
    assert policy("ppo", value_eps_clip=0.2).knobs.value_clip == 0.2
    reuse = policy("decoupled", prox_logp_method="reuse_train_logp", ppo_n_minibatches=1)
    assert reuse.knobs.proximal == "reuse"


def test_none_unsets() -> None:
    made = policy("dapo", clip_high="none", reward_norm="none", dual_clip=None).knobs
    assert (made.clip_high, made.reward_norm, made.dual_clip) == (None, None, None)
    assert policy("tis").knobs.rejection == TIS
    assert policy("tis", rejection="none").knobs.rejection is None


@pytest.mark.parametrize(
    ("name", "knobs", "message"),
    [
        ("grppo", {}, "did you mean 'grpo'"),
        ("zzz", {}, "choose one of"),
        ("grpo", {"clip_hihg": 0.3}, "did you mean 'clip_high'"),
        ("grpo", {"clip_low": 1.1}, "clip_low"),
        ("grpo", {"clip_low": "a"}, "must be of the kind"),
        ("grpo", {"decoupled": 1}, "must be of the kind"),
        ("grpo", {"minibatches": 1.5}, "must be of the kind"),
        ("grpo", {"minibatches": 0}, "above 0"),
        ("grpo", {"temperature": 0.0}, "above 0"),
        ("grpo", {"clip_low": 0.1, "eps_clip": 0.1}, "one knob"),
        ("grpo", {"dual_clip": 1.0}, "above 1"),
        ("grpo", {"behave_imp_weight_cap": 5}, "`upper` of rejection"),
        ("grpo", {"behave_imp_weight_mode": "token_mask"}, "action mask"),
        ("grpo", {"behaviour_cap": 2.0}, "rejection = "),
        ("grpo", {"max_head_offpolicyness": 4}, r"\[policy\] eta"),
        ("grpo", {"group_reward_norm": True}, 'reward_norm = "group/group"'),
        ("sapo", {"use_sapo_loss": False}, "sets objective = sapo"),
        ("grpo", {"overlong_reward_penalty": True}, "needs overlong_tokens"),
        ("grpo", {"use_sapo_loss": True, "use_cispo_loss": True}, "one knob"),
        ("grpo", {"kl_loss_coef": 0.1}, "k2 or k3"),
        ("grpo", {"rejection": {"upper": 5.0}}, "set decoupled = true"),
        ("grpo", {"m2_threshold": 0.04}, "set recompute = true"),
        ("grpo", {"proximal": "exact"}, "choose recompute"),
        ("grpo", {"rl_coef": 0.0}, "set teacher_coef"),
        ("grpo", {"reward_norm": {"group_size": 4}}, "groups carry their own sizes"),
        ("decoupled", {"proximal": "reuse"}, "set minibatches = 1"),
        ("sapo", {"decoupled": True}, "set decoupled = false"),
        ("sapo", {"sapo_tau_pos": 0.0}, "above 0"),
        ("sapo", {"dual_clip": 3.0}, "sapo has none"),
        ("gmpo", {"ratio_level": "sequence"}, "set ratio_level = token"),
        ("gmpo", {"dual_clip": 3.0}, "gmpo has none"),
        ("grpo", {"entropy_coef": -0.1}, "0 or more"),
        ("cispo", {"ratio_level": "sequence"}, "set ratio_level = token"),
        ("cispo", {"clip_high": 0.0}, "set clip_high above 0"),
        ("cispo", {"clip_high": None}, "set clip_high above 0"),
        ("cispo", {"eps_clip": 0.2}, "set clip_high above 0"),
        ("grpo", {"objective": "cispo", "clip_high": "none"}, "set clip_high above 0"),
        ("dapo", {"max_new_tokens": 512}, "must be below max_new_tokens"),
        ("ppo", {"discount": 1.5}, "discount"),
        ("ppo", {"gae_lambda": 2.0}, "gae_lambda"),
        ("sft", {"clip_low": 0.1}, "no knob"),
        ("dpo", {"beta": "high"}, "must be of the kind"),
        ("dpo", {"beta": 0.0}, "above 0"),
        ("dpo", {"loss_type": "hinge"}, "choose sigmoid or ipo"),
        ("simpo", {"gamma": -1.0}, "0 or more"),
        ("orpo", {"beta": 0.0}, "above 0"),
        ("kto", {"desirable_weight": -1.0}, "0 or more"),
        ("jsd", {}, "take distill-forward or distill-reverse"),
        ("OPO", {}, "take rloo"),
        ("simpoo", {}, "did you mean 'simpo'"),
        ("distill-forward", {"direction": "up"}, "choose forward or reverse"),
        ("reward-model", {"minibatches": 0}, "above 0"),
    ],
)
def test_wrong_names_and_knobs_are_refused(name: str, knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(BadConfiguration, match=message):
        algorithm(name, **knobs)
