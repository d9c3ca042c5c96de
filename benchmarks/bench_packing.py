"""Packing against padding on long-tailed lengths: `python -m benchmarks.bench_packing [--steps 5] [--samples 64]`.

The same samples, lengths log-normal around 48 tokens and up to 512, train a small Qwen2 by SFT on one thread: packed by
our forward pass, and padded to the longest of each micro-batch by plain transformers (sdpa, padding on the right, so no
mask is needed; hidden states of trained tokens alone meet the head). Both micro-batches hold at most `--budget` tokens,
padding among them. `filled` is the share of computed tokens that are samples', `times` the samples' tokens a second
against padding, `memory` what one micro-batch of each keeps for backward, a sample token: ratios of one run."""

from __future__ import annotations

import argparse
from functools import partial

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks.step_costs import VOCABULARY, kept, medians, model_state, sample_of
from millrace.trainers.backends.models.build import build
from millrace.trainers.backends.models.forward import token_logprobs
from millrace.trainers.batches.bins import ALLOCATORS
from millrace.trainers.batches.packing import cut, pack
from millrace.trainers.batches.sample import Sample

LONGEST = 512


def long_tailed(number: int) -> list[Sample]:
    """Samples with prompts of 8 tokens."""
    draw = np.random.default_rng(0)
    samples = []
    for seq in range(number):
        reply = int(np.clip(draw.lognormal(np.log(40), 0.9), 4, LONGEST - 8))
        asked, answer = (draw.integers(0, VOCABULARY, length) for length in (8, reply))
        samples.append(sample_of(asked, answer, 0.0, seq, 0))
    return samples


def in_turn(samples: list[Sample], budget: int) -> list[list[Sample]]:
    """Micro-batches of padded rows in the order the samples came in."""
    micros: list[list[Sample]] = [[]]
    for sample in samples:
        longest = max(other.length for other in [*micros[-1], sample])
        if micros[-1] and longest * (len(micros[-1]) + 1) > budget:
            micros.append([])
        micros[-1].append(sample)
    return micros


def padded_loss(model: PreTrainedModel, samples: list[Sample]) -> torch.Tensor:
    """Summed negative log-likelihood of what the samples' masks mark."""
    longest = max(sample.length for sample in samples)
    tokens = torch.zeros(len(samples), longest, dtype=torch.int64)
    mask = torch.zeros(len(samples), longest, dtype=torch.bool)
    for row, sample in enumerate(samples):
        tokens[row, : sample.length] = torch.from_numpy(sample.tokens.astype(np.int64))
        mask[row, : sample.length] = torch.from_numpy(sample.mask.astype(bool))
    hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1][mask[:, 1:]]
    logits = model.get_output_embeddings()(hidden)
    return torch.nn.functional.cross_entropy(logits.float(), tokens[mask], reduction="sum")


def main() -> None:
    """Prints one row a packing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--budget", type=int, default=2048)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    samples, state = long_tailed(chosen.samples), model_state(LONGEST)
    total = sum(sample.length for sample in samples)
    packed = build(state.assets, state.weights)
    config = AutoConfig.for_model(**packed.config.to_dict())
    padded = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    padded.load_state_dict(dict(state.weights))
    rows = in_turn(samples, chosen.budget)
    computed = sum(len(micro) * max(sample.length for sample in micro) for micro in rows)
    largest = max(rows, key=lambda micro: len(micro) * max(sample.length for sample in micro))

    def pad() -> float:
        total = 0.0
        for micro in rows:
            loss = padded_loss(padded, micro)
            loss.backward()
            total += float(loss.detach())
        return total

    print(f"{'way':>12} {'micro-batches':>13} {'filled':>7} {'memory':>7} {'tok/s':>8} {'times':>6}")
    base = kept(lambda: padded_loss(padded, largest)) / sum(sample.length for sample in largest)
    rate = 0.0
    for packing in ALLOCATORS:
        micros = cut(samples, chosen.budget, packing=packing)

        def run(micros: list[list[Sample]] = micros) -> float:
            losses = 0.0
            for micro in micros:
                loss = -token_logprobs(packed, pack(micro), 1.0)[0].sum()
                loss.backward()
                losses += float(loss.detach())
            return losses

        full = max(micros, key=lambda micro: sum(sample.length for sample in micro))
        memory = kept(partial(token_logprobs, packed, pack(full), 1.0)) / sum(sample.length for sample in full)
        slow, fast = medians([pad, run], chosen.steps)
        if not rate:
            rate = total / slow
            print(f"{'padded':>12} {len(rows):13} {total / computed:7.2f} {1:7.2f} {rate:8.0f} {1:6.2f}", flush=True)
        row = f"{packing:>12} {len(micros):13} {1:7.2f} {memory / base:7.2f} {total / fast:8.0f} {slow / fast:6.2f}"
        print(row, flush=True)


if __name__ == "__main__":
    main()
