"""The training of one batch: what a learner calls at each step.

    group samples into the plan's minibatches -> weigh them (advantages, masks) -> cut and pack -> recompute the
    proximal policy, if decoupled -> one optimizer step a minibatch -> a report that is the same on every rank

Invariants: every rank runs the same number of collectives, whatever it holds; the report's numbers are global; a batch
without a trainable token, or with no finite step, changes no byte and says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trainers.algorithms.base import Algorithm
from trainers.backends.base import Backend, StepResult
from trainers.batches.packing import Packed, Weighted, cut, pack
from trainers.batches.sample import Sample, check
from trainers.errors import BadConfiguration


@dataclass(frozen=True, slots=True)
class Schedule:
    """Learning rate: linear warm-up over `warmup` optimizer steps, then constant."""

    lr: float = 5e-4
    warmup: int = 0

    def at(self, step: int) -> float:
        """Of the optimizer step after `step` applied ones."""
        return self.lr * min(1.0, (step + 1) / self.warmup) if self.warmup else self.lr


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank computed of a batch: trajectories, tokens (all of their lineages that trained), groups."""

    samples: int
    tokens: int
    groups: int


@dataclass(frozen=True, slots=True)
class Report:
    """Of one batch, the same on every rank but for timings_*. unchanged: why no weight moved, else None."""

    metrics: dict[str, float]
    shares: list[Share]
    masked_tokens: int
    unchanged: str | None


class Trainer:
    """Trains a formed and loaded backend, batch by batch. `budget`: tokens a micro-batch holds at most."""

    def __init__(self, backend: Backend, algorithm: Algorithm, schedule: Schedule, *, budget: int = 16384) -> None:
        if budget < 1:
            raise BadConfiguration(f"a budget of {budget} tokens holds no sample")
        self.backend = backend
        self.algorithm = algorithm
        self.schedule = schedule
        self.budget = budget

    def train(
        self,
        samples: Sequence[Sample],
        *,
        minibatches: Sequence[Sequence[int]],
        version: int,
        oldest: int | None = None,
    ) -> Report:
        """Trains this rank's `samples` of a batch. All ranks call it together.

        minibatches: seqs of the whole batch (all ranks') in training order, as `allocation.plan` gives them. version:
        of the weights that train. oldest: tokens of an older version are masked (version - eta under mask-head). Raises
        BadSample before any collective, so check samples where they are read (`sample.check`) and leave the impossible
        ones out.
        """
        self.backend.clock.drain()
        with self.backend.clock.phase("other"):
            report = self._train(samples, minibatches, version, oldest)
        seconds = self.backend.clock.drain()
        report.metrics.update({f"timings_{name}": value for name, value in seconds.items()})
        report.metrics["timings_step"] = sum(seconds.values())
        return report

    def _train(
        self, samples: Sequence[Sample], minibatches: Sequence[Sequence[int]], version: int, oldest: int | None
    ) -> Report:
        check(samples, vocabulary=self.backend.vocabulary, longest=self.backend.longest)
        by_seq: dict[int, list[Weighted]] = {}
        for weighted in self.algorithm.weigh(samples, oldest):
            by_seq.setdefault(weighted.sample.seq, []).append(weighted)
        stray = by_seq.keys() - {seq for seqs in minibatches for seq in seqs}
        if stray:
            raise BadConfiguration(f"samples of seqs {sorted(stray)[:5]} are in no minibatch; plan the whole batch")
        cuts = [cut([w for seq in seqs for w in by_seq.get(seq, [])], self.budget) for seqs in minibatches]
        counts = self.backend.max([len(micros) for micros in cuts])
        packed = [
            [pack(micro) for micro in micros] + [pack([]) for _ in range(int(count) - len(micros))]
            for micros, count in zip(cuts, counts, strict=True)
        ]
        trainable = self.backend.sum([sum(micro.trainable for micro in micros) for micros in packed])
        if self.algorithm.needs_proximal():
            packed = [self._with_proximal(micros) for micros in packed]
        results = [
            self.backend.step(micros, self.algorithm, count, self.schedule.at(self.backend.steps))
            for micros, count in zip(packed, trainable, strict=True)
            if count > 0
        ]
        return self._report(samples, packed, results, version)

    def _with_proximal(self, micros: list[Packed]) -> list[Packed]:
        scored = self.backend.score(micros, self.algorithm.temperature)
        return [micro.with_proximal(logprobs) for micro, logprobs in zip(micros, scored, strict=True)]

    def _report(
        self, samples: Sequence[Sample], packed: list[list[Packed]], results: list[StepResult], version: int
    ) -> Report:
        micros = [micro for minibatch in packed for micro in minibatch]
        rewards = {s.trajectory: s.reward for s in samples}
        known = [reward for reward in rewards.values() if reward is not None]
        staleness = [(version - micro.versions)[micro.versions >= 0] for micro in micros]
        local = {
            "trainable": sum(micro.trainable for micro in micros),
            "kept": sum(float(micro.keep.sum()) for micro in micros),
            "aged": sum(ages.numel() for ages in staleness),
            "staleness": sum(float(ages.sum()) for ages in staleness),
            "rewards": len(known),
            "reward": math.fsum(known),
            "unrewarded": len(rewards) - len(known),
        }
        mine = [0.0] * (3 * self.backend.world)
        mine[3 * self.backend.rank : 3 * self.backend.rank + 3] = [
            len(rewards),
            sum(micro.length for micro in micros),
            len({s.seq for s in samples}),
        ]
        summed = self.backend.sum([*local.values(), *mine])
        total = dict(zip(local, summed, strict=False))
        shares = [Share(*(int(x) for x in summed[i : i + 3])) for i in range(len(local), len(summed), 3)]
        (oldest_token,) = self.backend.max([max((float(a.max()) for a in staleness if a.numel()), default=0.0)])
        applied = [result for result in results if result.applied]
        metrics = {
            "reward_mean": _ratio(total["reward"], total["rewards"]),
            "staleness_mean": _ratio(total["staleness"], total["aged"]),
            "staleness_max": oldest_token,
            "tokens_trainable": total["trainable"],
            "tokens_computed": float(sum(share.tokens for share in shares)),
            "samples": float(sum(share.samples for share in shares)),
            "samples_without_reward": total["unrewarded"],
            "steps": float(len(applied)),
            "steps_skipped": float(len(results) - len(applied)),
            "lr": self.schedule.at(max(0, self.backend.steps - 1)),
            **_means(self.algorithm, applied),
        }
        unchanged = None
        if not results:
            unchanged = "nothing trainable in the batch"
        elif not applied:
            unchanged = "non-finite loss or gradient"
        return Report(metrics, shares, int(total["trainable"] - total["kept"]), unchanged)


def _means(algorithm: Algorithm, results: Sequence[StepResult]) -> dict[str, float]:
    if not results:
        return {}
    kept = math.fsum(result.sums["kept"] for result in results)
    means = {
        name: _ratio(math.fsum(result.sums[name] for result in results), kept)
        for name in algorithm.measures
        if name != "kept"
    }
    return {
        "loss": math.fsum(result.loss for result in results) / len(results),
        "grad_norm": math.fsum(result.grad_norm for result in results) / len(results),
        **means,
    }


def _ratio(amount: float, count: float) -> float:
    return amount / count if count else 0.0
