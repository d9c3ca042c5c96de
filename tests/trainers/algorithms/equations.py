"""What algorithms minimise, as their pages show it: lines from reward to loss, which `table.py` puts
together. Knobs stand in them by their names.

Invariant: the lines of an algorithm, computed one after the other, give the loss of its code where nothing runs over
its bounds (exponents, and statistics of nothing or of one). A term that stands twice is changed in place. Knobs of
what becomes of a reward before a batch has it, `mask_truncated` and `reward_model_coef`, are in no line.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias


class EquationLine(NamedTuple):
    """term = text, in words: note. knobs: those that turn the term, or switch it to another form."""

    term: str
    text: str
    knobs: tuple[str, ...] = ()
    note: str = ""


Equation: TypeAlias = tuple[EquationLine, ...]

# ---- rewards

_REWARD = ("reward_norm", "reward_bias", "reward_scale", "reward_clip")
_KL = ("kl_coef", "kl_estimator", "recompute")
UNEQUAL = EquationLine(
    "batch",
    "the groups whose recorded r are not all equal",
    ("dynamic_sampling",),
    "it gets smaller; [policy] dynamic_sampling fills it",
)
OVERLONG = EquationLine(
    "r",
    "r + overlong_factor clip((max_new_tokens - overlong_tokens - n) / overlong_tokens, -1, 0)",
    ("overlong_tokens", "overlong_factor", "max_new_tokens"),
)
GROUP_NORM = EquationLine("r", "(r - mean_G r) / (std_G r + eps)", _REWARD)
GROUP_MEAN = EquationLine("r", "r - mean_G r", _REWARD)
GROUP_OTHERS = EquationLine("r", "r - (sum_G r - r) / (n_G - 1)", _REWARD, "the mean of the others")
GROUP_MEAN_BATCH_STD = EquationLine("r", "(r - mean_G r) / (std_B r + eps)", _REWARD)
KL_K1 = EquationLine("r_t", "[t is last] r - keep_t kl_coef clip(behav_t - ref_t, -10, 10)", (*_REWARD, *_KL))
KL_K2 = EquationLine("r_t", "[t is last] r - keep_t kl_coef clip((behav_t - ref_t)^2 / 2, -10, 10)", _KL)

# ---- advantages

_GAE = ("discount", "gae_lambda", "gae_lambda_by", "gae_unit")
OUTCOME = EquationLine("A_t", "r", (), "at every token alike")
OUTCOME_NORM = EquationLine("A_t", "(r - mean_T r) / (std_T r + eps)", ("advantage_norm",))
TO_GO = EquationLine("A_t", "r_t + discount gae_lambda A_{t+1}", _GAE, "0 after the last token")
DELTA = EquationLine(
    "delta_t",
    "[t is last] r + discount V_{t+1} - V_t",
    (*_REWARD, "critic", "discount", "bootstrap_truncated"),
    "V is 0 after the last token",
)
GAE = EquationLine("A_t", "delta_t + discount gae_lambda A_{t+1}", _GAE)
RETURNS = EquationLine("R_t", "A_t + V_t")
TOKEN_NORM = EquationLine("A_t", "(A_t - mean_T A) / (std_T A + eps)", ("advantage_norm",))
SAMPLE_ADVANTAGE = EquationLine("A_i", "mean_i A_t", ("ratio_level",))

# ---- ratios, and the repair of samples that another policy drew

RATIO = EquationLine("u_t", "exp(logp_t - behav_t)", ("recompute",))
SAMPLE_RATIO = EquationLine("u_i", "exp(mean_i (logp_t - behav_t))", ("ratio_level", "recompute"))
SHARE = EquationLine(
    "alpha_t",
    "clip((v_prox - v_behav) / (v_theta - v_behav), 0, 1)",
    ("proximal", "proximal_lag"),
    "0 where v_theta <= v_behav",
)
INTERPOLATED = EquationLine("prox_t", "behav_t + alpha_t (stopgrad(logp_t) - behav_t)", ("proximal",))
PROXIMAL_RATIO = EquationLine("u_t", "exp(logp_t - prox_t)", ("decoupled", "proximal"))
WEIGHT = EquationLine("w_t", "exp(prox_t - behav_t)", ("decoupled", "rejection"))
WEIGHT_CLAMPED = EquationLine("w_t", "min(exp(prox_t - behav_t), upper)", ("decoupled", "rejection"))
INSIDE = EquationLine("m_t", "1 where lower <= w_t <= upper, else 0", ("rejection",))
BERNOULLI = EquationLine("KL(p, q)", "p log(p / q) + (1 - p) log((1 - p) / (1 - q))")
NEAR = EquationLine(
    "m_t",
    "1 where max(KL(p_t, q_t), KL(q_t, p_t)) <= upper, else 0",
    ("rejection",),
    "p_t = exp(prox_t), q_t = exp(behav_t)",
)
SECOND_MOMENT = EquationLine(
    "m_t",
    "0 for the largest (prox_t - behav_t)^2 of the batch, else 1",
    ("m2_threshold",),
    "until the others' mean is below m2_threshold",
)

# ---- losses

_CLIP = ("objective", "clip_low", "clip_high", "dual_clip")
_SUM = ("aggregation", "minibatches", "kl_loss_coef", "entropy_coef")
CLIP = EquationLine("L_t", "-min(u_t A_t, clip(u_t, 1 - clip_low, 1 + clip_high) A_t)", _CLIP)
SAMPLE_CLIP = EquationLine("L_t", "-min(u_i A_i, clip(u_i, 1 - clip_low, 1 + clip_high) A_i)", _CLIP)
GATE = EquationLine("L_t", "-(4 / tau) sigmoid(tau (u_t - 1)) A_t", ("objective",))
STEEPNESS = EquationLine("tau", "sapo_tau_pos where A_t > 0, else sapo_tau_neg", ("sapo_tau_pos", "sapo_tau_neg"))
BOUNDED = EquationLine(
    "L_t",
    "-stopgrad(clip(u_t, 1 - clip_low, 1 + clip_high)) A_t logp_t",
    ("objective", "clip_low", "clip_high"),
)
NEAR_LOG = EquationLine(
    "d_t",
    "sign(A_i) min(sign(A_i) (logp_t - behav_t), sign(A_i) clip(logp_t - behav_t, -clip_low, clip_high))",
    ("clip_low", "clip_high", "recompute"),
)
GEOMETRIC = EquationLine("L_i", "-exp(mean_i d_t) A_i", ("objective",))
SAMPLE_MEAN_LOSS = EquationLine("loss", "sum_i (sum_{t in i} keep_t / n_i) L_i / S", ("aggregation", "minibatches"))
TAUGHT = EquationLine("T_t", "u_t (stopgrad(logp_t) - teacher_t)", ("teacher_coef",))
LOSS = EquationLine("loss", "sum_t keep_t L_t / N", _SUM)
SAMPLE_LOSS = LOSS._replace(note="long samples count by their tokens")
WEIGHED_LOSS = EquationLine("loss", "sum_t keep_t w_t L_t / N", _SUM)
MASKED_LOSS = EquationLine("loss", "sum_t keep_t m_t w_t L_t / N", _SUM)
TAUGHT_LOSS = EquationLine(
    "loss", "sum_t keep_t (rl_coef L_t + teacher_coef T_t) / N", ("rl_coef", "teacher_coef", *_SUM)
)
CRITIC_LOSS = EquationLine(
    "critic",
    "sum_t keep_t max((v_t - R_t)^2, (clip(v_t, V_t - value_clip, V_t + value_clip) - R_t)^2) / (2 N)",
    ("value_clip", "value_huber", "minibatches"),
)

SYMBOLS = {
    "r": "reward of a trajectory",
    "t": "a trainable token of a sample; t + 1 is the next one that is trainable",
    "n": "tokens of the longest reply of the trajectory: trainable ones without another between them",
    "sum_G, mean_G, std_G": "over the rewards of the group that [count](#normalisation); std divides by their number "
    "less 1; where all are equal, or one is alone, r and A_t are 0",
    "n_G": "rewards of the group that count",
    "std_B": "over the rewards of all groups whose rewards differ; std divides by their number less 1",
    "mean_T, std_T": "over the tokens of the batch that keep_t keeps, without those of groups of equal rewards where "
    "r is compared with mean_G; std divides by their number less 1",
    "mean_i": "over the tokens of sample i that keep_t keeps",
    "n_i, S": "trainable tokens of sample i, kept or not; samples of the minibatch",
    "A_t": "advantage of token t: above 0, it shall get likelier",
    "u_t": "how much likelier token t became",
    "w_t": "weight of token t: repairs that another policy drew it, or says how good its reply was",
    "m_t": "0 takes token t out of the sum",
    "eps": "of the normalisation: 1e-5 where it names none",
    "logp_t": "log-probability of token t under the weights that train",
    "behav_t": "log-probability of token t under the policy that sampled it, as the engine said",
    "prox_t": "log-probability of token t under the weights that the batch started from",
    "ref_t": "log-probability of token t under the frozen reference",
    "teacher_t": "log-probability of token t under the teacher",
    "v_t": "what the critic says now of what is to come from token t on",
    "V_t": "the same before the step",
    "v_behav": "version that sampled token t",
    "v_prox": "version that the batch started from, less `proximal_lag`",
    "v_theta": "version that the batch started from, plus the share of its optimizer steps that are made",
    "lower, upper": "as `rejection` has them",
    "stopgrad": "counts as a constant",
    "keep_t": '1; 0 where token t is too old (`[policy] release = "mask-head"`) or lacks a reward that it needs',
    "N": "trainable tokens of the minibatch, kept or not",
    "P": "pairs of the minibatch",
    "y": "a reply, the chosen or the rejected one of its pair; kto: of a lineage",
    "R": "replies of the minibatch that have a reward and a token that keep_t keeps",
    "mean_U": "over samples of a prompt and the reply to another one",
}
"""What stands in the lines -> what it means, in every equation that has it."""
