"""What learns from data instead of its own samples, on data made from the sort task, each with a measure of its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import islice

from millrace.apps.demo import sort_digits, tiny
from millrace.trainers.algorithms.kto import mismatches
from millrace.trainers.algorithms.registry import algorithm
from millrace.trainers.backends.models.build import with_scalar_head
from millrace.trainers.backends.torch.backend import TorchBackend
from millrace.trainers.batches.sample import Sample
from millrace.trainers.learning import Schedule, Trainer
from millrace.trainers.weights.state import State

MEASURES = {
    "sft": "loss",
    "dpo": "reward_accuracy",
    "ipo": "reward_accuracy",
    "simpo": "reward_accuracy",
    "orpo": "reward_accuracy",
    "kto": "reward_accuracy",
    "reward-model": "correct",
    "distill-forward": "loss",
    "distill-reverse": "loss",
}
"""algorithm -> the metric that says how well it learns"""
RATES = {"dpo": 1e-4, "ipo": 1e-4, "kto": 3e-4}
LR, WARMUP, PAIRS = 1e-3, 10, 32


def pairs(seed: int) -> Iterator[list[Sample]]:
    """Batches of 32 pairs: the digits sorted, and with two neighbours that differ swapped."""
    draw, source = random.Random(seed), sort_digits.prompts(seed)
    while True:
        batch = []
        for seq, digits in enumerate(islice((d for d in source if len(set(d)) > 1), PAIRS)):
            right = sort_digits.answer(digits)
            at = draw.choice([i for i in range(5) if right[i] != right[i + 1]])
            wrong = right[:at] + right[at + 1] + right[at] + right[at + 2 :]
            for name, text in (("a", right), ("b", wrong)):
                batch.append(
                    tiny.to_sample(
                        tiny.encode(digits),
                        [*tiny.encode(text)[2:-1], tiny.EOS],
                        [0.0] * 7,
                        reward=float(name == "a"),
                        seq=seq,
                        name=f"{seq}{name}",
                        version=0,
                    )
                )
        yield batch


def curve(name: str, warm: State, *, steps: int, seed: int = 7) -> list[float]:
    """The algorithm's measure on each step's fresh batch, before that step. `warm`: a policy that sorts already: what
    DPO, IPO and KTO start from and compare with, the reward model's body, the teacher of an untrained student. SimPO
    and ORPO start untrained."""
    starts: dict[str, Callable[[], State]] = {
        "reward-model": lambda: with_scalar_head(warm),
        **dict.fromkeys(("dpo", "ipo", "kto"), lambda: warm),
    }
    start = starts.get(name, lambda: tiny.random_state(seed + 1))()
    backend = TorchBackend(device="cpu")
    backend.form(0, 1, None, 60.0)
    held = {"reference": lambda: warm, "teacher": lambda: warm}
    trainer = Trainer(backend, algorithm(name), Schedule(RATES.get(name, LR), WARMUP), held=held)
    trainer.load(start)
    out = []
    for version, batch in enumerate(islice(pairs(seed), steps)):
        shown = [one for one in batch if name != "sft" or one.reward]
        shown += mismatches(batch, 64) if name == "kto" else []
        report = trainer.train(shown, minibatches=[range(PAIRS)], version=version)
        out.append(report.metrics[MEASURES[name]])
    backend.tear_down()
    return out
