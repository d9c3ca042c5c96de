"""Learner processes on the real broker of which one is the critic: who waits, and what the death of either does."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.consumers.cells import Cells, layout_of
from tests.support.learners import Place, until, version

pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.timeout(600)]

DRIFT = 5e-4
"""of any weight, the critic's too, from those of one uninterrupted learner that plays both roles"""

BACKEND = "torch[actor]:d2+torch[critic]:d1"
PPO = {"learner.algorithm": "ppo"}


def test_an_actor_and_a_critic_wait_train_die_and_go_on(
    tmp_path: Path, broker: str, place: Callable[..., Place]
) -> None:
    alone = f"1 learner here, {BACKEND} trains with 2 (actor 1, critic 1): start another"
    with Cells(tmp_path, broker, BACKEND, PPO) as it:
        it.start(3)
        until(lambda: it.members() == 3, it.learners)  # stable, so all have left what they had formed before
        assert layout_of(it.step()) == (BACKEND, [0, 1, -1], 0)

        it.dies("learner.after_step", rank=-1)
        assert layout_of(it.step()) == ("torch[actor]:d1+torch[critic]:d1", [0, -1], 0)

        it.dies("learner.after_step", rank=0)
        until(lambda: it.waits() == [alone], it.learners)
        assert version(it.bus, it.settings) == 2
        it.start()
        assert layout_of(it.step()) == ("torch[actor]:d1+torch[critic]:d1", [0, -1], 0)
        assert it.ledger()[-1]["metrics"]["value_loss"] > 0
        it.audit()
        assert it.drift(place) < DRIFT


def test_a_spare_takes_the_place_of_a_critic_that_freezes(
    tmp_path: Path, broker: str, place: Callable[..., Place]
) -> None:
    """Which is the reference too, beside an actor that two ranks hold together."""
    backend = "torch[actor]:t2+torch[critic]:d1|torch[reference]:d1"
    spare = (
        f"4 learners here, {backend} trains with multiples of 2 beside critic|reference 1: this one waits as a spare"
    )
    held = {"learner.knobs": json.dumps({"kl_coef": 0.1}), "learner.reference": str(tmp_path / "model")}
    formed = "torch[actor]:d1t2+torch[critic]:d1|torch[reference]:d1", [0, 0, -1]
    with Cells(tmp_path, broker, backend, {**PPO, **held}) as it:
        it.start(4)
        until(lambda: it.waits() == [spare], it.learners)
        assert layout_of(it.step()) == (*formed, 1)
        critic = it.of(-1)
        it.learners.signal(critic, signal.SIGSTOP)
        assert layout_of(it.step()) == (*formed, 0)
        it.learners.kill(critic)
        assert it.drift(place) < DRIFT
