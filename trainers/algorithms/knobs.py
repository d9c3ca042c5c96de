"""Every knob of the policy-gradient family, in one place. A preset is a set of them (`presets.py`).

Invariant: knobs that exist are knobs that work together; what contradicts is refused when they are made, with what to
do instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from millrace.trainers.algorithms.aggregation import AGGREGATIONS, Aggregation
from millrace.trainers.algorithms.kl import ESTIMATORS, Estimator
from millrace.trainers.algorithms.normalisation import Norm
from millrace.trainers.algorithms.policy_loss import OBJECTIVES, Objective
from millrace.trainers.algorithms.proximal import FORWARD, METHODS, Method
from millrace.trainers.algorithms.repair import Rejection
from millrace.trainers.errors import BadConfiguration


@dataclass(frozen=True)
class Knobs:
    """Defaults: PPO's clip on raw rewards, without a critic. The comment of a knob is its documentation."""

    # ---- the batch
    minibatches: int = 2  # optimizer steps that a batch is cut into
    temperature: float = 1.0  # what the behaviour policy sampled with
    dynamic_sampling: bool = False  # groups whose rewards are all equal leave the batch, which gets smaller: nothing
    # of them is counted. For DAPO's batch of fixed size set `[policy] dynamic_sampling`, which has others instead

    # ---- rewards
    overlong_tokens: int = 0  # replies within so many tokens of max_new_tokens are penalised: of a trajectory the
    # longest one; 0: none is
    overlong_factor: float = 1.0  # the penalty at the limit and beyond it
    max_new_tokens: int = 1024  # the limit of a reply, for the overlong penalty and aggregation = constant
    reward_model_coef: float = 0.0  # weight of a held reward model's score in the reward of a trajectory
    recorded_coef: float = 1.0  # weight of the recorded reward beside it; 0: the reward model alone
    reward_bias: float = 0.0  # added to rewards first
    reward_scale: float = 1.0  # multiplies rewards then
    reward_clip: float = math.inf  # rewards are clipped to plus and minus this
    reward_norm: Norm | None = None  # normalises rewards, over trajectories
    mask_truncated: bool = False  # a reply that was cut off takes no part: not in the loss, nor in any mean, deviation
    # or count (DAPO's overlong filtering). With bootstrap_truncated it trains, on what the critic says instead of its
    # reward, which is in no mean
    kl_coef: float = 0.0  # KL to the reference, in the reward of each token
    kl_estimator: Estimator = "k1"  # how the KLs to the reference are estimated

    # ---- advantages
    discount: float = 1.0  # gamma: what a reward is worth one step earlier
    gae_lambda: float = 1.0  # lambda, or what `gae_lambda_by` makes it from
    gae_lambda_by: Literal["constant", "length", "relative"] = "constant"  # how lambda follows a reply's length
    gae_unit: Literal["token", "turn"] = "token"  # what a step in time is
    advantage_norm: Norm | None = None  # normalises advantages, over the batch's tokens

    # ---- the loss
    objective: Objective = "clip"  # how a ratio becomes a loss
    ratio_level: Literal["token", "sequence"] = "token"  # sequence: one ratio a sample, as in GSPO
    clip_low: float = 0.2  # ratios count down to 1 - this; gmpo: their logarithms down to minus this
    clip_high: float | None = None  # ratios count up to 1 + this; gmpo: their logarithms up to this; none: as clip_low
    dual_clip: float | None = None  # bounds the loss of negative advantages to this times their size
    sapo_tau_pos: float = 1.0  # steepness of SAPO's gate, positive advantages
    sapo_tau_neg: float = 1.05  # steepness of SAPO's gate, negative advantages
    kl_loss_coef: float = 0.0  # KL to the reference, in the loss: of kl_estimator k2 or k3
    entropy_coef: float = 0.0  # entropy of the policy, taken off the loss: keeps it from being sure too soon
    aggregation: Aggregation = "token"  # how tokens make the loss of a minibatch: token, sequence or constant

    # ---- a teacher
    teacher_coef: float = 0.0  # distance of the sampled tokens to a teacher, in the loss
    rl_coef: float = 1.0  # share of the algorithm's own loss beside a teacher's; 0: the teacher alone

    # ---- stale and mismatched samples
    recompute: bool = False  # not decoupled: clip around recomputed log-probabilities instead of the engine's
    decoupled: bool = False  # clip around the proximal policy, weigh by its ratio to the behaviour policy
    proximal: Method = "recompute"  # decoupled: how the proximal policy is found
    proximal_lag: int = 0  # approximations: how many versions before the batch's own the proximal policy lies
    rejection: Rejection | None = None  # decoupled: what becomes of weights that are far off: a table with level,
    # action, metric, agg, upper, lower, weights
    m2_threshold: float | None = None  # M2PO: bound on the second moment of the log-ratio

    # ---- the critic
    critic: bool = False  # learn a value of each state, and advantages against it
    bootstrap_truncated: bool = False  # a reply that was cut off is worth what the critic says after its last token
    value_clip: float | None = 0.5  # a value's loss sees moves up to this from what it was; none: all
    value_huber: float | None = None  # errors beyond this count linearly; none: squared throughout

    def __post_init__(self) -> None:
        self._check_ranges()
        self._check_combinations()

    def _check_ranges(self) -> None:
        for name in ("minibatches", "temperature", "max_new_tokens", "reward_clip", "sapo_tau_pos", "sapo_tau_neg"):
            _require(getattr(self, name) > 0, f"{name} must be above 0, not {getattr(self, name)}")
        for name in (
            "overlong_tokens",
            "overlong_factor",
            "kl_coef",
            "kl_loss_coef",
            "entropy_coef",
            "proximal_lag",
            "teacher_coef",
            "rl_coef",
            "reward_model_coef",
            "recorded_coef",
        ):
            _require(getattr(self, name) >= 0, f"{name} must be 0 or more, not {getattr(self, name)}")
        for name in ("m2_threshold", "value_clip", "value_huber"):
            value = getattr(self, name)
            _require(value is None or value > 0, f"{name} must be above 0, or none; not {value}")
        for name, options in (
            ("objective", OBJECTIVES),
            ("ratio_level", ("token", "sequence")),
            ("kl_estimator", ESTIMATORS),
            ("gae_lambda_by", ("constant", "length", "relative")),
            ("gae_unit", ("token", "turn")),
            ("aggregation", AGGREGATIONS),
            ("proximal", METHODS),
        ):
            _require(getattr(self, name) in options, f"{name} {getattr(self, name)!r}: choose {', '.join(options)}")
        _require(0 <= self.discount <= 1, f"discount {self.discount} must be in [0, 1]")
        _require(
            self.gae_lambda >= 0 and (self.gae_lambda_by == "length" or self.gae_lambda <= 1),
            f"gae_lambda {self.gae_lambda} must be in [0, 1]",
        )
        _require(self.gae_lambda_by == "constant" or self.gae_lambda > 0, "a gae_lambda by length must be above 0")
        _require(0 <= self.clip_low <= 1, f"clip_low {self.clip_low} must be in [0, 1]: ratios are not negative")
        _require(self.high >= 0, f"clip_high {self.clip_high} must be 0 or more")
        _require(self.dual_clip is None or self.dual_clip > 1, f"dual_clip {self.dual_clip} must be above 1, or none")
        _require(
            self.overlong_tokens < self.max_new_tokens,
            f"overlong_tokens {self.overlong_tokens} must be below max_new_tokens {self.max_new_tokens}",
        )

    def _check_combinations(self) -> None:
        _require(
            self.objective == "clip" or self.dual_clip is None, f"dual_clip bounds the clip; {self.objective} has none"
        )
        if self.objective == "cispo":
            _require(
                self.clip_high is not None and self.clip_high > 0,
                "cispo bounds ratios from above: set clip_high above 0, such as 4 (eps_clip_higher)",
            )
        if self.objective in ("cispo", "gmpo"):
            why = "cispo weighs tokens" if self.objective == "cispo" else "gmpo clips tokens, then takes their mean"
            _require(self.ratio_level == "token", f"{why}: set ratio_level = token")
        _require(
            self.objective != "sapo" or not self.decoupled,
            "sapo takes the ratio to the policy that sampled: set decoupled = false",
        )
        _require(self.rejection is None or self.decoupled, "rejection bounds decoupled weights: set decoupled = true")
        _require(
            not (self.decoupled and self.proximal == "reuse" and self.minibatches > 1),
            "reuse is exact for one optimizer step a batch only: set minibatches = 1",
        )
        _require(self.critic or not self.bootstrap_truncated, "bootstrap_truncated asks a critic: set critic = true")
        _require(
            self.m2_threshold is None or self.needs_proximal,
            "m2_threshold compares with the recomputed policy: set recompute = true, or decoupled = true",
        )
        _require(
            self.kl_loss_coef == 0 or self.kl_estimator != "k1",
            "the gradient of k1 does not see the reference: beside kl_loss_coef set kl_estimator = k2 or k3, "
            "or put the KL into the reward with kl_coef",
        )
        _require(
            self.recorded_coef == 1 or self.reward_model_coef > 0,
            "recorded_coef weighs against a reward model: set reward_model_coef above 0, or reward_scale",
        )
        _require(
            not (self.dynamic_sampling and self.reward_model_coef > 0),
            "dynamic_sampling looks at rewards before a reward model has scored them: set dynamic_sampling = false",
        )
        _require(
            self.rl_coef == 1 or self.teacher_coef > 0, "rl_coef weighs against a teacher: set teacher_coef above 0"
        )

    @property
    def high(self) -> float:
        """The upper clip in force."""
        return self.clip_low if self.clip_high is None else self.clip_high

    @property
    def filters_overlong(self) -> bool:
        """Whether replies that were cut off are out of the batch."""
        return self.mask_truncated and not self.bootstrap_truncated

    @property
    def compares_in_groups(self) -> bool:
        """Whether a group of equal rewards has nothing to compare."""
        norms = (self.reward_norm, None if self.critic else self.advantage_norm)
        return self.dynamic_sampling or any(norm is not None and norm.by_group for norm in norms)

    @property
    def compares_states(self) -> bool:
        """Whether a critic finds something to compare in a group of equal rewards, which is not left out either."""
        return self.critic and not self.dynamic_sampling

    @property
    def needs_proximal(self) -> bool:
        """Whether log-probabilities are recomputed before the first optimizer step of a batch."""
        return self.proximal in FORWARD if self.decoupled else self.recompute

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen reference must be scored."""
        return self.kl_coef > 0 or self.kl_loss_coef > 0


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise BadConfiguration(message)
