"""The algorithms outside the policy-gradient family, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from millrace.trainers.algorithms.awr import Awr
from millrace.trainers.algorithms.distill import Distill
from millrace.trainers.algorithms.dpo import Dpo
from millrace.trainers.algorithms.reward_model import RewardModel
from millrace.trainers.algorithms.sft import Sft

Kind: TypeAlias = type[Sft] | type[Awr] | type[Dpo] | type[RewardModel] | type[Distill]


@dataclass(frozen=True)
class OtherAlgorithm:
    """kind: what makes it; about: one sentence on what it is; knobs: with what."""

    kind: Kind
    about: str
    knobs: Mapping[str, Any]


OTHERS: dict[str, OtherAlgorithm] = {
    "sft": OtherAlgorithm(Sft, "Next-token cross-entropy on the trainable tokens.", {}),
    "awr": OtherAlgorithm(Awr, "Imitates each reply by how much better it was than the others of its group.", {}),
    "dpo": OtherAlgorithm(Dpo, "Raises the chosen reply over the rejected one, against a frozen reference.", {}),
    "ipo": OtherAlgorithm(Dpo, "The same as DPO with a margin to reach instead of one to widen.", {"loss_type": "ipo"}),
    "reward-model": OtherAlgorithm(RewardModel, "A scalar head that scores the chosen reply higher.", {}),
    "distill-forward": OtherAlgorithm(Distill, "Covers all that the teacher may say.", {"direction": "forward"}),
    "distill-reverse": OtherAlgorithm(Distill, "Seeks what the teacher would say most.", {"direction": "reverse"}),
}
