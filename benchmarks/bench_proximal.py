"""An approximated proximal policy against a recomputed one: `python -m benchmarks.bench_proximal [--steps 5]`.

Decoupled GRPO on the same samples and weights in one process, one thread, two minibatches: `recompute` scores the batch
once more before it trains, `loglinear` takes the log-probabilities between the engine's and the trainer's, `reuse`
those of the one optimizer step that it allows. Printed: trained tokens a second, and the ratio to recompute."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch

from benchmarks.bench_backends import batch
from benchmarks.step_costs import medians, model_state
from millrace.trainers.algorithms.registry import policy
from millrace.trainers.backends.torch.backend import TorchBackend
from millrace.trainers.learning import Report, Schedule, Trainer

METHODS: dict[str, dict[str, Any]] = {
    "recompute": {},
    "loglinear": {"proximal": "loglinear"},
    "recompute, one minibatch": {"minibatches": 1},
    "reuse, one minibatch": {"proximal": "reuse", "minibatches": 1},
}


def trained(knobs: dict[str, Any]) -> Trainer:
    """A trainer with the model loaded."""
    backend = TorchBackend(device="cpu")
    backend.form(0, 1, None, 60.0)
    trainer = Trainer(backend, policy("decoupled", **knobs), Schedule(1e-4), budget=2048)
    trainer.load(model_state(256))
    return trainer


def main() -> None:
    """Prints a row a method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--groups", type=int, default=8)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    samples = batch(chosen.groups)

    def step(trainer: Trainer) -> Report:
        count, groups = trainer.algorithm.minibatches, chosen.groups
        cuts = [range(groups * i // count, groups * (i + 1) // count) for i in range(count)]
        return trainer.train(samples, minibatches=cuts, version=1)

    seconds = medians([partial(step, trained(knobs)) for knobs in METHODS.values()], chosen.steps)
    tokens = sum(sample.length for sample in samples)
    print(f"{tokens} tokens a step\n{'':25} tokens/s   ratio")
    for index, (name, spent) in enumerate(zip(METHODS, seconds, strict=True)):
        base = seconds[index - index % 2]
        print(f"{name:25} {tokens / spent:8.0f}  {base / spent:6.2f}")


if __name__ == "__main__":
    main()
