"""The algorithms outside the policy-gradient family, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from millrace.trainers.algorithms.awr import Awr
from millrace.trainers.algorithms.distill import Distill
from millrace.trainers.algorithms.dpo import Dpo
from millrace.trainers.algorithms.equations import GROUP_MEAN, Equation, EquationLine
from millrace.trainers.algorithms.reward_model import RewardModel
from millrace.trainers.algorithms.sft import Sft

Kind: TypeAlias = type[Sft] | type[Awr] | type[Dpo] | type[RewardModel] | type[Distill]


@dataclass(frozen=True)
class OtherAlgorithm:
    """kind: what makes it; knobs: with what; equation: what it minimises then; modules: whose equations it follows;
    about, when, family: as of a `Preset`."""

    kind: Kind
    about: str
    when: str
    equation: Equation
    family: str
    modules: tuple[str, ...]
    knobs: Mapping[str, Any]


SAID = (EquationLine("logp_t", "log softmax(logits)_t"), EquationLine("L_t", "-logp_t"))
GAP = EquationLine("Delta", "h_chosen - h_rejected")
MATCHED = EquationLine("loss", "sum_t keep_t D_t / N", ("minibatches",))
TEMPERED = EquationLine("p_v, q_v", "softmax(logits / temperature)_v of the student, of the teacher", ("temperature",))

OTHERS: dict[str, OtherAlgorithm] = {
    "sft": OtherAlgorithm(
        Sft,
        "Next-token cross-entropy on the trainable tokens.",
        "You have replies to imitate, or want a better start for what learns from rewards.",
        (*SAID, EquationLine("loss", "sum_t keep_t L_t / N", ("minibatches",))),
        "supervised",
        ("sft",),
        {},
    ),
    "awr": OtherAlgorithm(
        Awr,
        "Imitates each reply by how much better it was than the others of its group.",
        "You have rewarded replies of any age, whatever sampled them, several to a prompt.",
        (
            GROUP_MEAN._replace(knobs=()),
            EquationLine("w_t", "min(exp(r / beta), weight_clip)", ("beta", "weight_clip"), "at every token alike"),
            *SAID,
            EquationLine("loss", "sum_t keep_t w_t L_t / N", ("minibatches",)),
        ),
        "supervised",
        ("awr",),
        {},
    ),
    "dpo": OtherAlgorithm(
        Dpo,
        "Raises the chosen reply over the rejected one, against a frozen reference.",
        "You have pairs of replies of which people chose one.",
        (
            EquationLine("h_y", "sum_{t in y} keep_t (logp_t - ref_t)"),
            GAP,
            EquationLine("loss", "-sum_pairs log sigmoid(beta Delta) / P", ("beta", "loss_type", "minibatches")),
        ),
        "preferences",
        ("pairs", "dpo"),
        {},
    ),
    "ipo": OtherAlgorithm(
        Dpo,
        "The same as DPO with a margin to reach instead of one to widen.",
        "As for dpo, where pairs are few or agree so well that dpo would widen their margins without end.",
        (
            EquationLine("h_y", "sum_{t in y} keep_t (logp_t - ref_t) / sum_{t in y} keep_t"),
            GAP,
            EquationLine("loss", "sum_pairs (Delta - 1 / (2 beta))^2 / P", ("beta", "loss_type", "minibatches")),
        ),
        "preferences",
        ("pairs", "dpo"),
        {"loss_type": "ipo"},
    ),
    "reward-model": OtherAlgorithm(
        RewardModel,
        "A scalar head that scores the chosen reply higher.",
        "You have pairs of replies of which people chose one, and want a reward where no program can judge.",
        (
            EquationLine(
                "s_y", "what the value head says at the last token of y", (), "of several lineages, their mean"
            ),
            EquationLine("Delta", "s_chosen - s_rejected"),
            EquationLine("loss", "-sum_pairs log sigmoid(Delta) / P", ("minibatches",)),
        ),
        "preferences",
        ("pairs", "reward_model"),
        {},
    ),
    "distill-forward": OtherAlgorithm(
        Distill,
        "Covers all that the teacher may say.",
        "You have a teacher with the same vocabulary, and samples that it drew.",
        (TEMPERED, EquationLine("D_t", "sum_v q_v (log q_v - log p_v)", ("direction",)), MATCHED),
        "distillation",
        ("distill",),
        {"direction": "forward"},
    ),
    "distill-reverse": OtherAlgorithm(
        Distill,
        "Seeks what the teacher would say most.",
        "You have a teacher with the same vocabulary, and samples that the student drew.",
        (TEMPERED, EquationLine("D_t", "sum_v p_v (log p_v - log q_v)", ("direction",)), MATCHED),
        "distillation",
        ("distill",),
        {"direction": "reverse"},
    ),
}
