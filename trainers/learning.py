"""The training of one batch: what a learner calls at each step.

    group samples into the plan's minibatches -> cut and pack -> score (proximal policy, reference, teacher, critic,
    reward model), where the algorithm needs it -> weigh (advantages, masks) -> one optimizer step a minibatch -> a
    report that is the same on every rank

Invariants: every rank runs the same number of collectives, whatever it holds; the report's numbers are global; a batch
without a trainable token, or with no finite step, changes no byte and says so.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from millrace.trainers.algorithms import rewards
from millrace.trainers.algorithms.base import Algorithm, Scores
from millrace.trainers.algorithms.masks import fresh
from millrace.trainers.backends.base import Backend, StepResult
from millrace.trainers.backends.devices import memory_text
from millrace.trainers.backends.layout import ACTOR, CRITIC
from millrace.trainers.backends.models.build import with_scalar_head
from millrace.trainers.batches.bins import ALLOCATORS
from millrace.trainers.batches.packing import ADVANTAGES, PROXIMAL, REWARD_MODEL, VALUES, Floats, MicroBatch, cut, pack
from millrace.trainers.batches.sample import Sample, check
from millrace.trainers.compatibility import fits, right_head, same_vocabulary
from millrace.trainers.errors import REMEDIES, BadConfiguration, OutOfMemory
from millrace.trainers.schedule import Schedule
from millrace.trainers.weights.adapter import Lora
from millrace.trainers.weights.lora import merge, prepare
from millrace.trainers.weights.state import State

log = logging.getLogger("millrace.learning")
BUDGET = 8192
"""tokens of a row where no device says how many it has room for"""

__all__ = ["Report", "Schedule", "Share", "Trainer"]


@dataclass(frozen=True, slots=True)
class Share:
    """What one cell of ranks (one rank, where each holds the whole model) computed of a batch: trajectories, tokens
    (all of their lineages that trained), groups."""

    samples: int
    tokens: int
    groups: int


OnStep = Callable[[Sequence[MicroBatch], StepResult, float], None]
"""hears an optimizer step of the policy: this rank's micro-batches as they trained, what came of it, learning rate"""


@dataclass(frozen=True, slots=True)
class Report:
    """Of one batch, the same on every rank but for timings_*. masked_tokens: trainable ones that were too old to pull.
    unchanged: why no weight moved, else None."""

    metrics: dict[str, float]
    shares: list[Share]
    masked_tokens: int
    unchanged: str | None


class Trainer:
    """Trains a formed and loaded backend, batch by batch. `budget`: tokens a micro-batch holds at most; None: what the
    device has room for, measured before the first step, and `BUDGET` on a CPU. `held`: where frozen models (reference,
    teacher, reward_model) come from, by role. `critic_lr`: of the critic, which shares the warm-up. `lora`: the policy
    learns an adapter of this kind only. `packing`: how micro-batches are filled (`bins`). `prefix_sharing`: tokens that
    samples of a group begin with alike are computed once (`tree`). Neither changes what is learned."""

    def __init__(
        self,
        backend: Backend,
        algorithm: Algorithm,
        schedule: Schedule,
        *,
        budget: int | None = 16384,
        held: Mapping[str, Callable[[], State]] | None = None,
        critic_lr: float | None = None,
        lora: Lora | None = None,
        packing: str = "sequential",
        prefix_sharing: bool = False,
    ) -> None:
        if budget is not None and budget < 1:
            raise BadConfiguration(f"a budget of {budget} tokens holds no sample")
        if packing not in ALLOCATORS:
            raise BadConfiguration(f"no packing {packing!r}: choose one of {', '.join(ALLOCATORS)}")
        if prefix_sharing and not backend.shares_prefixes:
            raise BadConfiguration(
                f"{type(backend).__name__} computes whole samples alone: leave prefix_sharing out, or train with torch"
            )
        self.held = dict(held or {})
        for role in algorithm.holds:
            if role not in self.held:
                raise BadConfiguration(f"{algorithm.name} compares with a {role}: name the model to hold as {role}")
        if lora is not None and not backend.adapters:
            raise BadConfiguration(f"{type(backend).__name__} trains no adapters: leave lora out, or train with torch")
        for role in algorithm.holds:
            if role not in algorithm.needs and backend.apart(role):
                raise BadConfiguration(
                    f"{algorithm.name} compares whole distributions with the {role}, a number for each word of the "
                    f"vocabulary at each token, which is too much to send: give the {role} the actor's ranks, "
                    f"...[actor]:d1|...[{role}]:d1"
                )
        self.backend = backend
        self.algorithm = algorithm
        self.schedule = schedule
        self.budget = BUDGET if budget is None else budget
        self._is_auto = budget is None
        self._is_measured = not self._is_auto
        self._ceiling: int | None = None  # of a budget that ran out of memory
        self.lora = lora
        self.packing = packing
        self.prefix_sharing = prefix_sharing
        self.critic_schedule = schedule if critic_lr is None else replace(schedule, lr=critic_lr)
        self.stepped: OnStep | None = None

    def load(self, state: State) -> None:
        """Loads `state` into the backend, and all that the algorithm needs beside it: the frozen models, and a critic
        that starts from the policy's own layers where `state` has none. No collective."""
        state = prepare(state, self.lora)
        if self.algorithm.critic is None:
            state = replace(state, critic=None)
        elif state.critic is None:
            state = replace(state, critic=with_scalar_head(merge(state)))
        fits(state)
        models = {role: self.held[role]() for role in self.algorithm.holds if self.backend.plays(role)}
        for role, model in models.items():
            right_head(model, role)
            same_vocabulary(state, model, role, equal=role not in self.algorithm.needs)
        self.backend.load(state)
        for role, model in models.items():
            self.backend.hold(role, model)
        self._is_measured = not self._is_auto
        if self.prefix_sharing and self.backend.fills_rows:
            raise BadConfiguration(
                "this model computes each sample in a row of its own and shares no beginnings: leave prefix_sharing out"
            )

    def train(
        self,
        samples: Sequence[Sample],
        *,
        minibatches: Sequence[Sequence[int]],
        version: int,
        oldest: int | None = None,
    ) -> Report:
        """Trains this rank's `samples` of a batch (its cell's: share `data_rank` of `data_world`). All ranks call it
        together.

        minibatches: seqs of the whole batch (all ranks') in training order, as `allocation.plan` gives them. version:
        of the weights that train. oldest: tokens of an older version are masked (version - eta under mask-head). Raises
        BadSample before any collective, so check samples where they are read (`sample.check`) and leave the impossible
        ones out. OutOfMemory where a row was too long for the device: load the version again, and train the same batch
        with what is now the budget.
        """
        self.backend.clock.drain()
        try:
            with self.backend.clock.phase("other"):
                if not self._is_measured:
                    self._measure()
                report = self._train(samples, minibatches, version, oldest)
        except torch.OutOfMemoryError as error:
            raise self._shorten(samples, error) from None
        seconds = self.backend.clock.drain()
        report.metrics.update({f"timings_{name}": value for name, value in seconds.items()})
        report.metrics["timings_step"] = sum(seconds.values())
        return report

    def _train(
        self, samples: Sequence[Sample], minibatches: Sequence[Sequence[int]], version: int, oldest: int | None
    ) -> Report:
        samples = samples if self.backend.acts else []
        check(samples, vocabulary=self.backend.vocabulary, longest=self.backend.longest)
        stray = {sample.seq for sample in samples} - {seq for seqs in minibatches for seq in seqs}
        if stray:
            raise BadConfiguration(f"samples of seqs {sorted(stray)[:5]} are in no minibatch; plan the whole batch")
        batch = self.algorithm.accept(samples)
        micro_lists = self._pack(batch, minibatches, version)
        scores = self._scores(batch, micro_lists)
        weights = self.algorithm.weigh(batch, oldest, scores, self.backend.sum)
        micro_lists = [[micro.attach_samples(weights) for micro in micros] for micros in micro_lists]
        critic = self.algorithm.critic
        counts = self._counts(self.algorithm, micro_lists)
        valued_counts = counts if critic is None else self._counts(critic, micro_lists)
        results: list[StepResult] = []
        critic_results: list[StepResult] = []
        for micros, count, valued_count in zip(micro_lists, counts, valued_counts, strict=True):
            if count > 0:
                lr = self.schedule.at(self.backend.steps)
                critic_lr = self.critic_schedule.at(self.backend.steps)
                results.append(self.backend.step(micros, self.algorithm, count, lr, ACTOR))
                if self.stepped is not None:
                    self.stepped(micros, results[-1], lr)
                if critic is not None:
                    critic_results.append(self.backend.step(micros, critic, valued_count, critic_lr, CRITIC))
        report = self._report(samples, micro_lists, results, version, oldest)
        if REWARD_MODEL in self.algorithm.needs:
            report.metrics.update(self._rewards(batch, scores))
        if critic is not None:
            updates = [result for result in critic_results if result.applied]
            names = {"loss": "value_loss", "grad_norm": "value_grad_norm"}
            report.metrics.update({names.get(name, name): value for name, value in _means(critic, updates).items()})
            report.metrics["value_steps_skipped"] = float(len(critic_results) - len(updates))
            if updates:
                report = replace(report, unchanged=None)
        return report

    def _measure(self) -> None:
        """Makes the budget what the device has room for, the least of all ranks. Where one of them ran out of memory
        before, it is what was shortened to, and nobody measures. A collective."""
        ceiling = self._ceiling or math.inf
        (least,) = self.backend.max([-ceiling])
        if least == -math.inf:
            room = (self.backend.room() or BUDGET) if self.backend.acts else math.inf
            (least,) = self.backend.max([-room])
        self.budget = -int(least)
        self._is_measured = True
        log.info("rows of %d tokens", self.budget)

    def fix_budget(self, budget: int) -> None:
        """Makes an automatic budget `budget` until another version is loaded, whatever the device has room for."""
        if self._is_auto:
            self.budget, self._is_measured = budget, True

    @property
    def kernels(self) -> dict[str, str]:
        """How steps are computed, for the record of a version."""
        return {**self.backend.kernels, "tokens_per_pack": str(self.budget)}

    def _shorten(self, samples: Sequence[Sample], error: torch.OutOfMemoryError) -> OutOfMemory | BadConfiguration:
        """Halves the budget, or what rows held of it. What to raise."""
        lengths = [sample.length for sample in samples]
        longest, former = max(lengths, default=1), min(self.budget, max(sum(lengths), 1))
        if former <= longest:
            return BadConfiguration(f"a sample of {longest} tokens does not fit ({memory_text(error)}): {REMEDIES}")
        self.budget = max(longest, former // 2)
        self._ceiling = self.budget
        return OutOfMemory(
            f"a step with rows of {former} tokens ran out of memory ({memory_text(error)}); it can be done again with "
            f"rows of {self.budget}: [learner] tokens_per_pack = {self.budget} begins with that"
        )

    def _counts(self, algorithm: Algorithm, micro_lists: list[list[MicroBatch]]) -> list[float]:
        """Each minibatch's denominator of this algorithm's loss, over all cells."""
        return self.backend.sum([sum(algorithm.count(micro) for micro in micros) for micros in micro_lists])

    def _pack(
        self, samples: Sequence[Sample], minibatches: Sequence[Sequence[int]], version: int
    ) -> list[list[MicroBatch]]:
        """Micro-batches of each minibatch, as many on every rank."""
        by_seq: dict[int, list[Sample]] = {}
        for sample in samples:
            by_seq.setdefault(sample.seq, []).append(sample)
        parts = [[sample for seq in seqs for sample in by_seq.get(seq, [])] for seqs in minibatches]
        cuts = [self._cut(part) for part in parts]
        counts = [int(count) for count in self.backend.max([len(micros) for micros in cuts])]
        micro_lists = []
        for index, (part, micros, count) in enumerate(zip(parts, cuts, counts, strict=True)):
            if self.packing != "sequential" and len(micros) < count:
                more = self._cut(part, count)  # as many as the others have, instead of idle ones
                micros = more if len(more) <= count else micros
            padding: list[list[Sample]] = [[]] * (count - len(micros))
            theta = version + index / len(minibatches)
            rows = [pack(micro, share=self.prefix_sharing) for micro in [*micros, *padding]]
            micro_lists.append([replace(micro, v_prox=version, v_theta=theta) for micro in rows])
        return micro_lists

    def _cut(self, samples: Sequence[Sample], least: int = 1) -> list[list[Sample]]:
        return cut(
            samples,
            self.budget,
            unite=self.algorithm.whole,
            packing=self.packing,
            least=least,
            share=self.prefix_sharing,
            rows=self.backend.fills_rows,
        )

    def _scores(
        self, samples: Sequence[Sample], micro_lists: list[list[MicroBatch]]
    ) -> dict[str, dict[Sample, Floats]]:
        """What the algorithm needs to know of each token before the batch is weighed."""
        micros = [micro for minibatch in micro_lists for micro in minibatch]
        scores: dict[str, dict[Sample, Floats]] = {}
        for name in self.algorithm.needs:
            if name == VALUES:
                split = [
                    _values(micro, v.numpy()) for micro, v in zip(micros, self.backend.values(micros), strict=True)
                ]
            elif name == REWARD_MODEL:
                scored_rows = self.backend.values(micros, REWARD_MODEL)
                split = [_last(micro, v.numpy()) for micro, v in zip(micros, scored_rows, strict=True)]
            else:
                role = ACTOR if name == PROXIMAL else name
                columns = self.backend.score(micros, self.algorithm.temperature, role)
                split = [micro.split(column) for micro, column in zip(micros, columns, strict=True)]
            empty_row = np.zeros(int(name == VALUES), np.float32)
            scores[name] = {sample: empty_row for sample in samples if not sample.trainable}
            scores[name] |= {sample: row for rows in split for sample, row in rows.items()}
        return scores

    def _rewards(self, samples: Sequence[Sample], scores: Scores) -> dict[str, float]:
        """Of a reward model: its scores, and the rewards that trained, over the trajectories of all ranks."""
        marks = rewards.model_scores(samples, scores[REWARD_MODEL])
        used = self.algorithm.trained_rewards(samples, scores)
        total = len({(s.group, s.trajectory) for s in samples})
        sums = [len(marks), math.fsum(marks.values()), len(used), math.fsum(used.values()), total]
        mark_count, mark, reward_count, reward, every = self.backend.sum(sums)
        return {
            "reward_model_mean": _ratio(mark, mark_count),
            "reward_used_mean": _ratio(reward, reward_count),
            "samples_without_score": every - mark_count,
        }

    def _report(
        self,
        samples: Sequence[Sample],
        micro_lists: list[list[MicroBatch]],
        results: list[StepResult],
        version: int,
        oldest: int | None,
    ) -> Report:
        micros = [micro for minibatch in micro_lists for micro in minibatch]
        by_trajectory = {s.trajectory: s.reward for s in samples}
        rewards = [reward for reward in by_trajectory.values() if reward is not None]
        staleness = [(version - micro.versions)[micro.versions >= 0] for micro in micros]
        local = {
            "trainable": sum(micro.trainable for micro in micros),
            "stale": sum(int((~fresh(sample, oldest)).sum()) for sample in samples),
            "aged": sum(ages.numel() for ages in staleness),
            "staleness": sum(float(ages.sum()) for ages in staleness),
            "rewards": len(rewards),
            "reward": math.fsum(rewards),
            "unrewarded": len(by_trajectory) - len(rewards),
            "pulling": sum(_pulling(micro) for micro in micros),
            "plain": sum(member.length for micro in micros for member in micro.members),
        }
        cells = [0.0] * (3 * self.backend.data_world)
        first = 3 * self.backend.data_rank
        cells[first : first + 3] = [
            len(by_trajectory),
            sum(micro.length for micro in micros),
            len({s.seq for s in samples}),
        ]
        sums = self.backend.sum([*local.values(), *cells])
        total = dict(zip(local, sums, strict=False))
        shares = [Share(*(int(x) for x in sums[i : i + 3])) for i in range(len(local), len(sums), 3)]
        (oldest_token,) = self.backend.max([max((float(a.max()) for a in staleness if a.numel()), default=0.0)])
        updates = [result for result in results if result.applied]
        metrics = {
            "reward_mean": _ratio(total["reward"], total["rewards"]),
            "staleness_mean": _ratio(total["staleness"], total["aged"]),
            "staleness_max": oldest_token,
            "tokens_trainable": total["trainable"],
            "tokens_computed": float(sum(share.tokens for share in shares)),
            "samples": float(sum(share.samples for share in shares)),
            "samples_without_reward": total["unrewarded"],
            **({"tokens_pulling": total["pulling"]} if self.algorithm.pulls else {}),
            "steps": float(len(updates)),
            "steps_skipped": float(len(results) - len(updates)),
            "lr": self.schedule.at(max(0, self.backend.steps - 1)),
            **_means(self.algorithm, updates),
        }
        if self.prefix_sharing:
            metrics["tree_token_ratio"] = _ratio(metrics["tokens_computed"], total["plain"])
        if self.algorithm.pulls and results and not total["pulling"]:
            log.warning(
                "the batch of version %d teaches nothing: no reward of it differs from those it is compared with, so "
                "every advantage is 0; look at the verifier, or set [policy] dynamic_sampling",
                version,
            )
        reason = None
        if not results:
            reason = "nothing trainable in the batch"
        elif not updates:
            reason = "non-finite loss or gradient"
        return Report(metrics, shares, int(total["stale"]), reason)


def _pulling(micro: MicroBatch) -> float:
    """Tokens that pull: kept, with an advantage that is not 0."""
    if ADVANTAGES not in micro.columns:
        return 0.0
    return float(((micro.advantages != 0) & (micro.keep > 0)).sum())


def _values(micro: MicroBatch, values: Floats) -> dict[Sample, Floats]:
    """V float32[T] of a micro-batch -> by sample, before each trainable token and after the last one."""
    if not micro.members:
        return {}
    before, after = values[micro.at.numpy()], values[micro.ends.numpy()]
    bounds = np.cumsum([member.trainable for member in micro.members])
    rows = np.split(np.insert(before, bounds, after), np.cumsum([m.trainable + 1 for m in micro.members])[:-1])
    return dict(zip(micro.members, rows, strict=True))


def _last(micro: MicroBatch, values: Floats) -> dict[Sample, Floats]:
    """V float32[T] of a micro-batch -> by sample, after its last token, float32[1]."""
    return {member: values[[int(end)]] for member, end in zip(micro.members, micro.ends, strict=True)}


def _means(algorithm: Algorithm, results: Sequence[StepResult]) -> dict[str, float]:
    if not results:
        return {}
    count = math.fsum(result.sums["kept"] for result in results)
    means = {
        name: _ratio(math.fsum(result.sums[name] for result in results), count)
        for name in algorithm.measures
        if name not in ("kept", "rejected")
    }
    if "rejected" in algorithm.measures:
        refusals = math.fsum(result.sums["rejected"] for result in results)
        means["rejected_fraction"] = _ratio(refusals, count + refusals)
    return {
        "loss": math.fsum(result.loss for result in results) / len(results),
        "grad_norm": math.fsum(result.grad_norm for result in results) / len(results),
        **means,
    }


def _ratio(amount: float, count: float) -> float:
    return amount / count if count else 0.0
