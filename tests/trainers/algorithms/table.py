"""What the pages of algorithms say beside what the code says of itself: when to take each, and what it minimises."""

from __future__ import annotations

from dataclasses import dataclass

from tests.trainers.algorithms import equations as eq
from tests.trainers.algorithms.equations import Equation, EquationLine


@dataclass(frozen=True)
class AlgorithmPage:
    """when: one sentence on when to take it; family: its heading in the index, of `pages.FAMILIES`; equation: what it
    minimises with the knobs that it sets; modules: whose parts it is made of, where its knobs do not say so."""

    when: str
    family: str
    equation: Equation
    modules: tuple[str, ...] = ()


CLIPPED = (eq.RATIO, eq.CLIP)
GROUPED_REWARDS = (eq.GROUP_NORM, eq.OUTCOME_NORM)
CLAMPED = (eq.PROXIMAL_RATIO, eq.WEIGHT_CLAMPED, eq.CLIP, eq.WEIGHED_LOSS)

LOG_LOSS = (EquationLine("logp_t", "log softmax(logits)_t"), EquationLine("L_t", "-logp_t"))
GAP = EquationLine("Delta", "h_chosen - h_rejected")
MEAN_LOGP = EquationLine("h_y", "sum_{t in y} keep_t logp_t / sum_{t in y} keep_t")
DISTANCE = EquationLine("loss", "sum_t keep_t D_t / N", ("minibatches",))
TEMPERED = EquationLine("p_v, q_v", "softmax(logits / temperature)_v of the student, of the teacher", ("temperature",))


PAGES: dict[str, AlgorithmPage] = {
    "grpo": AlgorithmPage(
        "Rewards can be checked and each prompt gets several samples. Begin here if in doubt.",
        "advantages",
        (eq.GROUP_NORM, eq.OUTCOME, *CLIPPED, eq.LOSS),
    ),
    "ppo": AlgorithmPage(
        "Episodes are long, or a prompt gets one sample; a second model, the critic, fits into memory.",
        "critic",
        (eq.DELTA, eq.GAE, eq.RETURNS, eq.TOKEN_NORM, *CLIPPED, eq.LOSS, eq.CRITIC_LOSS),
    ),
    "drgrpo": AlgorithmPage(
        "Prompts that are nearly always or nearly never solved shall not pull harder than others.",
        "advantages",
        (eq.GROUP_MEAN, eq.OUTCOME, *CLIPPED, eq.LOSS),
    ),
    "rloo": AlgorithmPage(
        "A prompt gets few samples: no reward is part of the baseline that it is compared with.",
        "advantages",
        (eq.GROUP_OTHERS, eq.OUTCOME_NORM, *CLIPPED, eq.LOSS),
    ),
    "reinforce++": AlgorithmPage(
        "A prompt gets one sample, or rewards mean the same on every prompt.",
        "advantages",
        (eq.KL_K1, eq.TO_GO, eq.TOKEN_NORM, *CLIPPED, eq.LOSS),
    ),
    "reinforce++-baseline": AlgorithmPage(
        "As for reinforce++, where a prompt gets several samples and some prompts are harder than others.",
        "advantages",
        (eq.GROUP_MEAN, eq.KL_K2, eq.TO_GO, eq.TOKEN_NORM, *CLIPPED, eq.LOSS),
    ),
    "liteppo": AlgorithmPage(
        "The rewards of a group are often nearly equal, so that their own deviation is noise.",
        "advantages",
        (eq.GROUP_MEAN_BATCH_STD, eq.OUTCOME_NORM, *CLIPPED, eq.LOSS),
    ),
    "dapo": AlgorithmPage(
        "Replies are long and may reach their limit; many prompts are always or never solved.",
        "advantages",
        (eq.UNEQUAL, eq.OVERLONG, *GROUPED_REWARDS, *CLIPPED, eq.LOSS),
    ),
    "gspo": AlgorithmPage(
        "The ratio of a single token is noise: mixture-of-experts models, long replies.",
        "ratios",
        (*GROUPED_REWARDS, eq.SAMPLE_RATIO, eq.SAMPLE_ADVANTAGE, eq.SAMPLE_CLIP, eq.SAMPLE_LOSS),
    ),
    "sapo": AlgorithmPage(
        "A hard clip silences too many tokens: the metric `clipped` stays high.",
        "ratios",
        (*GROUPED_REWARDS, eq.RATIO, eq.STEEPNESS, eq.GATE, eq.LOSS),
    ),
    "cispo": AlgorithmPage(
        "Rare tokens that open a line of thought would be clipped away.",
        "ratios",
        (*GROUPED_REWARDS, eq.RATIO, eq.BOUNDED, eq.LOSS),
    ),
    "gmpo": AlgorithmPage(
        "Single tokens with large ratios make updates jump; replies of one prompt have like lengths.",
        "ratios",
        (eq.GROUP_NORM, eq.OUTCOME, eq.SAMPLE_ADVANTAGE, eq.NEAR_LOG, eq.GEOMETRIC, eq.SAMPLE_MEAN_LOSS),
    ),
    "m2po": AlgorithmPage(
        "Samples are many versions old.",
        "off-policy",
        (*GROUPED_REWARDS, eq.PROXIMAL_RATIO, eq.WEIGHT, eq.SECOND_MOMENT, eq.CLIP, eq.MASKED_LOSS),
    ),
    "decoupled": AlgorithmPage(
        "Samples come from versions before the one that trains: `[policy] eta` is 1 or more.",
        "off-policy",
        (eq.GROUP_NORM, eq.OUTCOME, *CLAMPED),
    ),
    "decoupled-loglinear": AlgorithmPage(
        "As for decoupled, where one more forward pass a batch costs too much.",
        "off-policy",
        (eq.GROUP_NORM, eq.OUTCOME, eq.SHARE, eq.INTERPOLATED, *CLAMPED),
    ),
    "tis": AlgorithmPage(
        "The engine's numbers differ from the trainer's: quantised weights, other kernels.",
        "off-policy",
        (*GROUPED_REWARDS, *CLAMPED),
    ),
    "icepop": AlgorithmPage(
        "A mixture-of-experts model routes tokens otherwise in the engine than in the trainer.",
        "off-policy",
        (*GROUPED_REWARDS, eq.PROXIMAL_RATIO, eq.WEIGHT, eq.INSIDE, eq.CLIP, eq.MASKED_LOSS),
    ),
    "kpop": AlgorithmPage(
        "As for icepop, where engine and trainer drift further apart in training.",
        "off-policy",
        (*GROUPED_REWARDS, eq.PROXIMAL_RATIO, eq.WEIGHT, eq.BERNOULLI, eq.NEAR, eq.CLIP, eq.MASKED_LOSS),
    ),
    "distill-on-policy": AlgorithmPage(
        "A stronger model with the same vocabulary is at hand, and rewards are rare.",
        "distillation",
        (eq.GROUP_NORM, eq.OUTCOME, *CLIPPED, eq.TAUGHT, eq.TAUGHT_LOSS),
    ),
    "sft": AlgorithmPage(
        "You have replies to imitate, or want a better start for what learns from rewards.",
        "supervised",
        (*LOG_LOSS, EquationLine("loss", "sum_t keep_t L_t / N", ("minibatches",))),
        ("sft",),
    ),
    "awr": AlgorithmPage(
        "You have rewarded replies of any age, whatever sampled them, several to a prompt.",
        "supervised",
        (
            eq.GROUP_MEAN._replace(knobs=()),
            EquationLine("w_t", "min(exp(r / beta), weight_clip)", ("beta", "weight_clip"), "at every token alike"),
            *LOG_LOSS,
            EquationLine("loss", "sum_t keep_t w_t L_t / N", ("minibatches",)),
        ),
        ("awr",),
    ),
    "dpo": AlgorithmPage(
        "You have pairs of replies of which people chose one.",
        "preferences",
        (
            EquationLine("h_y", "sum_{t in y} keep_t (logp_t - ref_t)"),
            GAP,
            EquationLine("loss", "-sum_pairs log sigmoid(beta Delta) / P", ("beta", "loss_type", "minibatches")),
        ),
        ("pairs", "dpo"),
    ),
    "ipo": AlgorithmPage(
        "As for dpo, where pairs are few or agree so well that dpo would widen their margins without end.",
        "preferences",
        (
            EquationLine("h_y", "sum_{t in y} keep_t (logp_t - ref_t) / sum_{t in y} keep_t"),
            GAP,
            EquationLine("loss", "sum_pairs (Delta - 1 / (2 beta))^2 / P", ("beta", "loss_type", "minibatches")),
        ),
        ("pairs", "dpo"),
    ),
    "simpo": AlgorithmPage(
        "As for dpo, where a second model does not fit into memory, or dpo makes replies longer and longer.",
        "preferences",
        (
            MEAN_LOGP,
            GAP,
            EquationLine("loss", "-sum_pairs log sigmoid(beta Delta - gamma) / P", ("beta", "gamma", "minibatches")),
        ),
        ("pairs", "simpo"),
    ),
    "orpo": AlgorithmPage(
        "You have pairs and a base model that was not tuned to reply yet: it learns both at once.",
        "preferences",
        (
            MEAN_LOGP,
            EquationLine("o_y", "h_y - log(1 - exp(h_y))", (), "log odds"),
            EquationLine("Delta", "o_chosen - o_rejected"),
            EquationLine("loss", "-sum_pairs (h_chosen + beta log sigmoid(Delta)) / P", ("beta", "minibatches")),
        ),
        ("pairs", "orpo"),
    ),
    "kto": AlgorithmPage(
        "You know of each reply whether it was good, and have no pairs.",
        "preferences",
        (
            EquationLine("h_y", "sum_{t in y} keep_t (logp_t - ref_t)", (), "of every reply that has a reward"),
            EquationLine("z", "max(0, mean_U sum_{t in y} (prox_t - ref_t))"),
            EquationLine("s_y", "1 where r > threshold, else -1", ("threshold",)),
            EquationLine(
                "lambda_y",
                "desirable_weight where s_y > 0, else undesirable_weight",
                ("desirable_weight", "undesirable_weight"),
            ),
            EquationLine("loss", "sum_y lambda_y sigmoid(-s_y beta (h_y - z)) / R", ("beta", "minibatches")),
        ),
        ("kto",),
    ),
    "reward-model": AlgorithmPage(
        "You have pairs of replies of which people chose one, and want a reward where no program can judge.",
        "preferences",
        (
            EquationLine(
                "s_y", "what the value head says at the last token of y", (), "of several lineages, their mean"
            ),
            EquationLine("Delta", "s_chosen - s_rejected"),
            EquationLine("loss", "-sum_pairs log sigmoid(Delta) / P", ("minibatches",)),
        ),
        ("pairs", "reward_model"),
    ),
    "distill-forward": AlgorithmPage(
        "You have a teacher with the same vocabulary, and samples that it drew.",
        "distillation",
        (TEMPERED, EquationLine("D_t", "sum_v q_v (log q_v - log p_v)", ("direction",)), DISTANCE),
        ("distill",),
    ),
    "distill-reverse": AlgorithmPage(
        "You have a teacher with the same vocabulary, and samples that the student drew.",
        "distillation",
        (TEMPERED, EquationLine("D_t", "sum_v p_v (log p_v - log q_v)", ("direction",)), DISTANCE),
        ("distill",),
    ),
}
