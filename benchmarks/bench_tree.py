"""Prefix sharing against plain packing: `python -m benchmarks.bench_tree [--steps 5] [--prompts 256] [--reply 32]`.

Groups of samples that begin with one prompt train by GRPO on a small Qwen2, as whole samples and as trees, in turns, on
one thread. `tokens` is what a tree computes of the samples' tokens, `memory` what its forward pass keeps for its
backward pass against the plain one, `times` the samples' tokens a second against plain: all ratios of one run."""

from __future__ import annotations

import argparse

import numpy as np
import torch

from benchmarks.step_costs import VOCABULARY, kept, medians, model_state, sample_of
from millrace.trainers.algorithms.registry import policy
from millrace.trainers.backends.torch.backend import TorchBackend
from millrace.trainers.batches.sample import Sample
from millrace.trainers.learning import Report, Schedule, Trainer

SIZES = (8, 16)


def groups(size: int, prompt: int, reply: int, number: int) -> list[Sample]:
    """`number` groups of `size` samples, their replies of half to one and a half times `reply` tokens."""
    draw = np.random.default_rng(size)
    samples = []
    for seq in range(number):
        asked = draw.integers(0, VOCABULARY, prompt)
        for index in range(size):
            answer = draw.integers(0, VOCABULARY, int(draw.integers(reply // 2, reply * 3 // 2 + 1)))
            samples.append(sample_of(asked, answer, float(index % 2), seq, index))
    return samples


class Way:
    """One way to train the same samples, again and again."""

    def __init__(self, samples: list[Sample], longest: int, prefix_sharing: bool) -> None:
        backend = TorchBackend(device="cpu")
        backend.form(0, 1, None, 60.0)
        algorithm = policy("grpo", minibatches=1)
        self._trainer = Trainer(backend, algorithm, Schedule(1e-5), budget=10**7, prefix_sharing=prefix_sharing)
        self._trainer.load(model_state(longest))
        self._samples = samples
        self._minibatches = [sorted({sample.seq for sample in samples})]

    def __call__(self) -> Report:
        return self._trainer.train(self._samples, minibatches=self._minibatches, version=0)


def main() -> None:
    """Prints one row a group size and prompt length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--prompts", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--reply", type=int, default=32)
    parser.add_argument("--groups", type=int, default=2)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'group':>5} {'prompt':>6} {'reply':>5} {'tokens':>7} {'memory':>7} {'plain tok/s':>11} {'times':>6}")
    for size in SIZES:
        for prompt in chosen.prompts:
            samples = groups(size, prompt, chosen.reply, chosen.groups)
            plain, shared = (Way(samples, prompt + 2 * chosen.reply, on) for on in (False, True))
            memory = kept(shared) / kept(plain)
            ratio = shared().metrics["tree_token_ratio"]
            slow, fast = medians([plain, shared], chosen.steps)
            rate = sum(sample.length for sample in samples) / slow
            print(
                f"{size:5} {prompt:6} {chosen.reply:5} {ratio:7.2f} {memory:7.2f} {rate:11.0f} {slow / fast:6.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
