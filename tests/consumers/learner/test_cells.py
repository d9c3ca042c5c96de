"""Learner processes on the real broker that train in cells: who waits, who is spare, what a death in a cell does."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.consumers.cells import Cells, layout_of
from tests.support.learners import Place, until, version

pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.timeout(600)]

DRIFT = 5e-4
"""of any weight from those of one uninterrupted learner, after a few versions"""


def test_cells_of_two_wait_train_lose_one_and_go_on(tmp_path: Path, broker: str, place: Callable[..., Place]) -> None:
    alone = "1 learner here, torch:t2 trains with 2: start another"
    spare = "3 learners here, torch:t2 trains with multiples of 2: this one waits as a spare"
    with Cells(tmp_path, broker, "torch:t2") as it:
        it.feed()
        it.start()
        it.says(0, alone)
        until(lambda: it.waits() == [alone], it.learners)
        assert version(it.bus, it.settings) == 0
        it.start()
        assert layout_of(it.step()) == ("torch:d1t2", [0, 0], 0)

        it.dies("learner.after_step")
        until(lambda: it.waits() == [alone], it.learners)
        assert version(it.bus, it.settings) == 1
        it.start()
        assert layout_of(it.step()) == ("torch:d1t2", [0, 0], 0)

        it.start()
        until(lambda: any(spare in it.learners.output(n) for n in it.alive()), it.learners)
        until(lambda: it.waits() == [spare], it.learners)
        assert layout_of(it.step()) == ("torch:d1t2", [0, 0], 1)

        it.learners.kill(it.of(-1))
        assert layout_of(it.step()) == ("torch:d1t2", [0, 0], 0)

        it.start(2)
        until(lambda: it.members() == 4, it.learners)  # stable, so all have left what they had formed before
        last = it.step()
        assert layout_of(last) == ("torch:d2t2", [0, 0, 1, 1], 0)
        assert [share["samples"] > 0 for share in last["ranks"]] == [True, False, True, False]

        alive = it.alive()
        for number in alive:
            it.learners.signal(number, signal.SIGTERM)
        assert [it.learners.wait(number) for number in alive] == [0, 0, 0, 0]
        assert it.drift(place) < DRIFT


def test_a_spare_ends_when_the_last_wanted_version_is_committed(tmp_path: Path, broker: str) -> None:
    with Cells(tmp_path, broker, "torch:c2", MILLRACE_LEARNER__MAX_VERSIONS="1") as it:
        it.start(3)
        until(lambda: any("spare" in it.learners.output(n) for n in range(3)), it.learners)
        assert layout_of(it.step()) == ("torch:d1c2", [0, 0], 1)
        assert [it.learners.wait(number) for number in range(3)] == [0, 0, 0]


def test_one_line_takes_the_loop_to_megatron(tmp_path: Path, broker: str, place: Callable[..., Place]) -> None:
    """Under the shim that answers for a GPU."""
    with Cells(tmp_path, broker, "megatron:p2", MEGATRON_SHIM="1") as it:
        it.start(2)
        assert layout_of(it.step()) == ("megatron:d1p2", [0, 0], 0)
        it.dies("checkpoint.after_rename")
        assert version(it.bus, it.settings) == 1
        it.start()
        it.step()
        assert layout_of(it.step()) == ("megatron:d1p2", [0, 0], 0)
        assert it.drift(place) < DRIFT


def test_zero_cuts_the_weights_over_learners(tmp_path: Path, broker: str, place: Callable[..., Place]) -> None:
    """Stage 3 over two learners, then over the one that is left."""
    with Cells(tmp_path, broker, "deepspeed", MILLRACE_LEARNER__ZERO_STAGE="3") as it:
        it.start(2)
        until(lambda: it.members() == 2, it.learners)
        assert layout_of(it.step()) == ("deepspeed:d2", [0, 1], 0)
        it.dies("learner.after_step")
        assert layout_of(it.step()) == ("deepspeed:d1", [0], 0)
        assert it.drift(place) < DRIFT
