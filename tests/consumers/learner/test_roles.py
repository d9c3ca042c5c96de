"""Learner processes on the real broker of which one is the critic: who waits, and what the death of either does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cells import Cells, layout_of
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
