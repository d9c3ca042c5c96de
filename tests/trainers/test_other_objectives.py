"""Preferences, reward models and teachers on data made from the sort task: each gets better at what it measures."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from trainers import checkpoint, tiny
from trainers.algorithms.registry import algorithm
from trainers.backends.fsdp import TorchBackend
from trainers.backends.models import with_scalar_head
from trainers.batches.sample import Sample
from trainers.learning import Schedule, Trainer
from trainers.state import State
from trainers.tasks import sort_digits

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> State:
    path: Path = tmp_path_factory.mktemp("policy")
    tiny.make_sort_policy(path, seed=0)
    return checkpoint.adopt(path)


def reply(digits: str) -> list[int]:
    return [*tiny.encode(digits)[2:-1], tiny.EOS]


def pairs(seed: int) -> Iterator[list[Sample]]:
    """Batches of 32 pairs: the digits sorted, and with two neighbours that differ swapped."""
    draw, source = random.Random(seed), sort_digits.prompts(seed)
    while True:
        batch = []
        for seq, digits in enumerate(islice((d for d in source if len(set(d)) > 1), 32)):
            right = sort_digits.answer(digits)
            at = draw.choice([i for i in range(5) if right[i] != right[i + 1]])
            wrong = right[:at] + right[at + 1] + right[at] + right[at + 2 :]
            for name, text in (("a", right), ("b", wrong)):
                batch.append(
                    tiny.to_sample(
                        tiny.encode(digits),
                        reply(text),
                        [0.0] * 7,
                        reward=float(name == "a"),
                        seq=seq,
                        name=f"{seq}{name}",
                        version=0,
                    )
                )
        yield batch


def measured(name: str, begin: State, measure: str, steps: int, held: dict[str, Any], lr: float) -> list[float]:
    """The measure on each step's fresh batch, before that step."""
    backend = TorchBackend(device="cpu")
    backend.form(0, 1, None, 60.0)
    trainer = Trainer(backend, algorithm(name), Schedule(lr, 10), held=held)
    trainer.load(begin)
    out = []
    for version, batch in enumerate(islice(pairs(7), steps)):
        report = trainer.train(batch, minibatches=[range(32)], version=version)
        out.append(report.metrics[measure])
    backend.tear_down()
    return out


@pytest.mark.parametrize("name", ["dpo", "ipo"])
def test_preferences_are_learned(warm: State, name: str) -> None:
    margins = measured(name, warm, "reward_accuracy", 40, {"reference": lambda: warm}, 1e-4)
    assert sum(margins[-5:]) / 5 >= 0.95


def test_a_reward_model_tells_right_from_wrong(warm: State) -> None:
    correct = measured("reward-model", with_scalar_head(warm), "correct", 60, {}, 1e-3)
    assert sum(correct[:3]) / 3 <= 0.7
    assert sum(correct[-5:]) / 5 >= 0.9


@pytest.mark.parametrize("name", ["distill-forward", "distill-reverse"])
def test_a_student_comes_near_its_teacher(warm: State, name: str) -> None:
    losses = measured(name, tiny.random_state(1), "loss", 60, {"teacher": lambda: warm}, 1e-3)
    assert losses[-1] < 0.5 * losses[0]
