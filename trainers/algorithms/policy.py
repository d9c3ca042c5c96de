"""The policy-gradient family: GRPO, PPO, RLOO and their kin, composed from parts by `Knobs`.

    r     recorded rewards, a reward model's scores               `rewards.py`
    A     rewards -> one advantage a token                        `advantages.py`, `normalisation.py`
    keep  which tokens may pull                                   `masks.py`
    old   the policy that the ratio is taken to                   `proximal.py`
    L_t   ratio and advantage -> loss of a token                  `policy_loss.py`
    w_t   repair of samples that another policy drew              `repair.py`
    loss  sum_t w_t L_t keep_t / N                                `aggregation.py`

A trajectory without a reward, or without a token that may pull, takes no part: neither in statistics nor with its
tokens, which N still counts. A reply that was cut off, where these are masked, is not even counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from millrace.trainers.algorithms import advantages as adv
from millrace.trainers.algorithms import distill, kl, proximal
from millrace.trainers.algorithms.aggregation import aggregate, count, sample_sums, token_sum
from millrace.trainers.algorithms.base import Algorithm, Scores, Sums, TokenAlgorithm, Weights
from millrace.trainers.algorithms.knobs import Knobs
from millrace.trainers.algorithms.masks import fresh, second_moment
from millrace.trainers.algorithms.normalisation import Reduce, alone, differs_in_group, normalise
from millrace.trainers.algorithms.policy_loss import (
    cispo,
    clipped_surrogate,
    gmpo,
    sapo,
    sequence_advantages,
    sequence_ratio,
)
from millrace.trainers.algorithms.repair import clamp_marks, repair
from millrace.trainers.algorithms.rewards import RewardTable, mix_rewards, recorded_rewards
from millrace.trainers.algorithms.value_loss import ValueLoss
from millrace.trainers.batches.packing import (
    ADVANTAGES,
    KEEP,
    PROXIMAL,
    REFERENCE,
    RETURNS,
    REWARD_MODEL,
    TEACHER,
    VALUES,
    MicroBatch,
)
from millrace.trainers.batches.sample import Sample
from millrace.trainers.errors import BadConfiguration

N = TypeVar("N", bound=np.generic)

MEASURES = ("kept", "clipped", "ratio", "kl", "entropy", "behaviour_weight")


@dataclass(frozen=True, slots=True)
class FlatTokens:
    """A batch's tokens before it is cut. owners int64[M]: which of `samples` samples a token belongs to."""

    owners: torch.Tensor
    samples: int


@dataclass(frozen=True)
class PolicyGradient(TokenAlgorithm):
    """`label`: the preset it began as."""

    knobs: Knobs
    label: str = "policy-gradient"

    @property
    def name(self) -> str:
        return self.label

    @property
    def minibatches(self) -> int:
        return self.knobs.minibatches

    @property
    def temperature(self) -> float:
        return self.knobs.temperature

    @cached_property
    def measures(self) -> tuple[str, ...]:
        k = self.knobs
        more = ["rejected"] if k.rejection is not None else []
        more += ["clamped"] if k.rejection is not None and k.rejection.action == "clamp" else []
        more += ["reference_kl"] if k.kl_loss_coef > 0 else []
        more += ["teacher_kl"] if k.teacher_coef > 0 else []
        more += [f"error_{kind}" for kind in proximal.APPROXIMATIONS] if self._compares else []
        return (*MEASURES, *more)

    @property
    def pulls(self) -> bool:
        return self.knobs.teacher_coef == self.knobs.kl_loss_coef == self.knobs.entropy_coef == 0

    @property
    def entropy_learns(self) -> bool:
        return self.knobs.entropy_coef > 0

    @property
    def needs(self) -> tuple[str, ...]:
        k = self.knobs
        roles = {
            PROXIMAL: k.needs_proximal,
            REFERENCE: k.needs_reference,
            TEACHER: k.teacher_coef > 0,
            VALUES: k.critic,
            REWARD_MODEL: k.reward_model_coef > 0,
        }
        return tuple(name for name, is_needed in roles.items() if is_needed)

    @property
    def critic(self) -> Algorithm | None:
        return ValueLoss(self.knobs) if self.knobs.critic else None

    @property
    def _compares(self) -> bool:
        return self.knobs.decoupled and self.knobs.proximal == "metrics"

    # ---- before the step

    def accept(self, samples: Sequence[Sample]) -> list[Sample]:
        """No reply that was cut off, where these are masked; then, under dynamic sampling, groups with at least two
        different rewards."""
        whole = [sample for sample in samples if not (self.knobs.filters_overlong and sample.truncated)]
        if not self.knobs.dynamic_sampling:
            return whole
        rewards = recorded_rewards(whole)
        groups = [group for group, _ in rewards]
        differs = differs_in_group(np.array(list(rewards.values()), np.float64), groups)
        teaching = {group for group, teaches in zip(groups, differs, strict=True) if teaches}
        return [sample for sample in whole if sample.group in teaching]

    def weigh(
        self, samples: Sequence[Sample], oldest: int | None, scores: Scores | None = None, reduce: Reduce = alone
    ) -> Weights:
        k, score_table = self.knobs, dict(scores or {})
        in_order = sorted(samples, key=lambda s: (s.group, s.trajectory, s.lineage))
        lengths = np.array([s.trainable for s in in_order], np.int64)
        reward_table = self.trained_rewards(in_order, score_table)
        keep = _flat([fresh(s, oldest) & ((s.group, s.trajectory) in reward_table) for s in in_order], np.bool_)
        behaviour = _flat([s.logprobs[s.mask != 0] for s in in_order], np.float32)
        old_logprobs = _role_scores(score_table, PROXIMAL, in_order) if k.needs_proximal and score_table else behaviour
        may_pull = self._may_pull(lengths, keep, old_logprobs, behaviour)
        outcomes, teaches = self._outcomes(in_order, may_pull, reward_table, reduce)
        takes_part = keep & np.repeat(may_pull & teaches, lengths)
        rewards = adv.outcome_rewards(self._kl_rewards(in_order, old_logprobs, keep, score_table), lengths, outcomes)
        values, last = np.zeros(len(old_logprobs)), np.zeros(len(in_order))
        if k.critic:
            every = _role_scores(score_table, VALUES, in_order).astype(np.float64)
            ends = np.cumsum(lengths + 1) - 1
            values, last = np.delete(every, ends), every[ends]
        advantages, returns = self._estimate(in_order, rewards, values, lengths, last)
        if k.advantage_norm is not None:
            groups = [s.group for s, n in zip(in_order, lengths, strict=True) for _ in range(n)]
            advantages = normalise(advantages, groups, k.advantage_norm, mask=takes_part, reduce=reduce)
        advantages = np.where(takes_part, advantages, 0.0)
        if k.m2_threshold is not None:
            keep = second_moment(behaviour, _role_scores(score_table, PROXIMAL, in_order), keep, k.m2_threshold, reduce)
        columns = {ADVANTAGES: advantages, KEEP: keep}
        if k.critic:
            columns |= {RETURNS: returns, VALUES: values}
        for name in self.needs:
            if name in score_table and name not in (VALUES, REWARD_MODEL):
                columns[name] = _role_scores(score_table, name, in_order)
        return _by_sample(in_order, lengths, columns)

    def trained_rewards(self, samples: Sequence[Sample], scores: Scores) -> RewardTable:
        k = self.knobs
        if k.reward_model_coef == 0:
            return recorded_rewards(samples)
        if REWARD_MODEL not in scores:
            raise BadConfiguration("this algorithm needs a reward model's scores; score the batch before it is weighed")
        coefs = {"recorded_coef": k.recorded_coef, "reward_model_coef": k.reward_model_coef}
        return mix_rewards(samples, scores[REWARD_MODEL], **coefs)

    def _may_pull(
        self, lengths: adv.Ints, keep: NDArray[np.bool_], old: NDArray[np.float32], behaviour: NDArray[np.float32]
    ) -> NDArray[np.bool_]:
        """bool[S]: whether a token of the sample may pull, as far as it is known before the step."""
        k = self.knobs
        tokens = FlatTokens(torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)), len(lengths))
        stays = torch.from_numpy(keep)
        if k.rejection is not None and k.rejection.action == "mask" and k.needs_proximal:
            stays = repair(torch.from_numpy(old), torch.from_numpy(behaviour), stays.float(), k.rejection, tokens)[1]
        return (sample_sums(stays.float(), tokens) > 0).numpy()

    def _outcomes(
        self, in_order: Sequence[Sample], may_pull: NDArray[np.bool_], reward_table: RewardTable, reduce: Reduce
    ) -> tuple[adv.F64, NDArray[np.bool_]]:
        """The shaped and normalised reward of each sample's trajectory, 0 where it does not count; and whether its
        group teaches, bool[S]."""
        k = self.knobs
        counts = {
            (s.group, s.trajectory)
            for s, may in zip(in_order, may_pull, strict=True)
            if may and not (s.truncated and k.mask_truncated)
        }
        trajectories = sorted(reward_table.keys() & counts)
        groups = [group for group, _ in trajectories]
        rewards = np.array([reward_table[key] for key in trajectories], np.float64)
        if k.overlong_tokens:
            longest = dict.fromkeys(trajectories, 0)
            for s in in_order:
                if (key := (s.group, s.trajectory)) in longest:
                    longest[key] = max(longest[key], adv.longest_reply(s.mask))
            sizes = np.array(list(longest.values()), np.float64)
            rewards = rewards + adv.overlong_penalty(
                sizes, limit=k.max_new_tokens, buffer=k.overlong_tokens, factor=k.overlong_factor
            )
        rewards = adv.shape(rewards, bias=k.reward_bias, scale=k.reward_scale, clip=k.reward_clip)
        teaches = differs_in_group(rewards, groups) if k.compares_in_groups else np.ones(len(rewards), bool)
        if k.reward_norm is not None:
            rewards = normalise(rewards, groups, k.reward_norm, mask=teaches, reduce=reduce)
        by_trajectory = {
            key: (reward, k.compares_states or bool(teach))
            for key, reward, teach in zip(trajectories, rewards.tolist(), teaches, strict=True)
        }
        pairs = [by_trajectory.get((s.group, s.trajectory), (0.0, k.compares_states)) for s in in_order]
        return np.array([reward for reward, _ in pairs], np.float64), np.array([teach for _, teach in pairs], np.bool_)

    def _kl_rewards(
        self, in_order: Sequence[Sample], old_logprobs: NDArray[np.float32], keep: NDArray[np.bool_], scores: Scores
    ) -> adv.F64:
        if self.knobs.kl_coef == 0:
            return np.zeros(len(old_logprobs))
        reference = _role_scores(scores, REFERENCE, in_order)
        gap = kl.estimate(
            self.knobs.kl_estimator, torch.from_numpy(old_logprobs).double(), torch.from_numpy(reference).double()
        )
        return np.where(keep, -self.knobs.kl_coef * gap.clamp(-kl.CLAMP, kl.CLAMP).numpy(), 0.0)

    def _estimate(
        self, in_order: Sequence[Sample], rewards: adv.F64, values: adv.F64, lengths: adv.Ints, last: adv.F64
    ) -> tuple[adv.F64, adv.F64]:
        k = self.knobs
        turns = adv.turns_of([s.mask for s in in_order])
        sizes = lengths if k.gae_unit == "token" else adv.by_turn(turns, lengths)[1]
        lam = adv.lambdas(k.gae_lambda_by, k.gae_lambda, sizes)
        goes_on = np.array([s.truncated and k.bootstrap_truncated for s in in_order], bool)
        bootstrap = np.where(goes_on, last, 0.0)
        if k.gae_unit == "turn":
            return adv.turn_gae(rewards, values, turns, lengths, discount=k.discount, lam=lam, bootstrap=bootstrap)
        advantages = adv.gae(rewards, values, lengths, discount=k.discount, lam=lam, bootstrap=bootstrap)
        return advantages, advantages + values

    # ---- in the step

    def loss(self, logprobs: torch.Tensor, entropy: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, Sums]:
        k, keep = self.knobs, batch.keep
        old_logprobs = self._old_logprobs(logprobs, batch)
        # What is masked must not reach an exponential: its gradient would be 0 times infinity.
        logprobs = torch.where(keep > 0, logprobs, old_logprobs)
        weight = torch.ones_like(batch.behaviour)
        if k.decoupled:
            weight, keep = repair(old_logprobs, batch.behaviour, keep, k.rejection, batch)
            weight = torch.where(keep > 0, weight, 0.0)
        ratio, advantages = torch.exp(logprobs - old_logprobs), batch.advantages
        if k.ratio_level == "sequence" or k.objective == "gmpo":
            ratio = sequence_ratio(logprobs - old_logprobs, batch.keep, batch)
            advantages = sequence_advantages(advantages, batch.keep, batch)
        is_clipped = torch.zeros_like(ratio, dtype=torch.bool)
        if k.objective == "clip":
            losses, is_clipped = clipped_surrogate(ratio, advantages, k.clip_low, k.high, k.dual_clip)
        elif k.objective == "gmpo":
            losses, is_clipped = gmpo(logprobs - old_logprobs, advantages, k.clip_low, k.high, batch.keep, batch)
        elif k.objective == "sapo":
            losses = sapo(ratio, advantages, k.sapo_tau_pos, k.sapo_tau_neg)
        else:
            losses = cispo(logprobs, ratio, advantages, k.clip_low, k.high)
        losses = weight * losses
        if k.teacher_coef > 0:
            losses = k.rl_coef * losses + k.teacher_coef * distill.towards(
                batch.column(TEACHER), logprobs, old_logprobs
            )
        if k.kl_loss_coef > 0:
            gap = kl.estimate(k.kl_estimator, logprobs, batch.column(REFERENCE))
            losses = losses + k.kl_loss_coef * gap
        if k.entropy_coef > 0:
            losses = losses - k.entropy_coef * torch.where(keep > 0, entropy, 0.0)
        loss = aggregate(k.aggregation, losses, keep, batch)
        with torch.no_grad():
            distance = logprobs.detach() - batch.behaviour
            sums = {
                "kept": keep.sum(),
                "clipped": token_sum(is_clipped.float(), keep),
                "ratio": token_sum(ratio.detach(), keep),
                "kl": token_sum(torch.exp(distance) - 1 - distance, keep),
                "entropy": token_sum(entropy, keep),
                "behaviour_weight": token_sum(weight, keep),
            }
            if k.rejection is not None:
                sums["rejected"] = batch.keep.sum() - keep.sum()
                if k.rejection.action == "clamp":
                    share = clamp_marks(old_logprobs, batch.behaviour, batch.keep, k.rejection, batch)
                    sums["clamped"] = token_sum(share, keep)
            if k.kl_loss_coef > 0:
                sums["reference_kl"] = token_sum(gap.detach(), keep)
            if k.teacher_coef > 0:
                sums["teacher_kl"] = token_sum(logprobs.detach() - batch.column(TEACHER), keep)
            if self._compares:
                for kind in proximal.APPROXIMATIONS:
                    sums[f"error_{kind}"] = token_sum(
                        (self._approximate(kind, logprobs, batch) - old_logprobs).abs(), keep
                    )
        return loss, sums

    def count(self, batch: MicroBatch) -> float:
        return count(self.knobs.aggregation, self.knobs.max_new_tokens, batch)

    def _old_logprobs(self, logprobs: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        k = self.knobs
        if k.needs_proximal:
            return batch.column(PROXIMAL)
        return self._approximate(k.proximal, logprobs, batch) if k.decoupled else batch.behaviour

    def _approximate(self, kind: str, logprobs: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        start = batch.v_prox - self.knobs.proximal_lag
        return proximal.approximate(
            kind, logprobs, batch.behaviour, batch.versions, v_prox=start, v_theta=batch.v_theta
        )


def _flat(rows: Sequence[NDArray[np.generic]], dtype: type[N]) -> NDArray[N]:
    return np.asarray(np.concatenate([np.zeros(0, dtype), *rows]), dtype)


def _role_scores(scores: Scores, name: str, in_order: Sequence[Sample]) -> NDArray[np.float32]:
    if name not in scores:
        raise BadConfiguration(f"this algorithm needs the {name} of each token; score the batch before it is weighed")
    return _flat([scores[name][s] for s in in_order], np.float32)


def _by_sample(in_order: Sequence[Sample], lengths: adv.Ints, columns: Mapping[str, NDArray[np.generic]]) -> Weights:
    bounds = np.cumsum(lengths)[:-1]
    pieces = {name: np.split(column.astype(np.float32), bounds) for name, column in columns.items()}
    return {sample: {name: pieces[name][index] for name in columns} for index, sample in enumerate(in_order)}
