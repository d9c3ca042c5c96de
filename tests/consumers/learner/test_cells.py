"""Learner processes on the real broker that train in cells: who waits, who is spare, what a death in a cell does."""

from __future__ import annotations

import signal
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from consumers import policy
from infra.bus.kafka import KafkaBus
from infra.topics import full_name
from schemas import codec
from schemas.ids import now_micros
from tests.support.feed import feed, settings_for, start_policy
from tests.support.learners import Learners, Place, entries, until, version
from trainers import checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.timeout(600)]

DRIFT = 5e-4
"""of any weight from those of one uninterrupted learner, after a few versions"""


HEADS = 4
"""attention heads of the model, which two ranks can share"""


class Cells:
    """A policy and learners of one layout. Use as a context."""

    def __init__(self, folder: Path, bootstrap: str, backend: str, **environment: str) -> None:
        self.settings, file = settings_for(
            folder, bootstrap, f"t{uuid.uuid4().hex[:8]}", **{"learner.backend": backend}
        )
        self.bus = KafkaBus(bootstrap)
        start_policy(self.settings, self.bus, folder, heads=HEADS)
        self.learners = Learners(folder, file)
        self._armed = folder / "armed"
        self._armed.mkdir()
        self._environment = {
            "MILLRACE_LEARNER__BACKEND": backend,
            "MILLRACE_KILL_DIR": str(self._armed),
            **environment,
        }
        self._fed = 0

    def start(self, count: int = 1) -> None:
        for _ in range(count):
            self.learners.start(**self._environment)

    def feed(self) -> None:
        """Make one more batch ready."""
        feed(self.bus, self.settings, range(4 * self._fed, 4 * self._fed + 4))
        self._fed += 1

    def step(self) -> Mapping[str, Any]:
        """Feed a batch if none waits, and wait for its version; its ledger entry."""
        if version(self.bus, self.settings) == self._fed:
            self.feed()
        until(lambda: version(self.bus, self.settings) >= self._fed, self.learners)
        return self.ledger()[-1]

    def dies(self, point: str) -> None:
        """Feed a batch, and wait until the first learner that passes `point` with it is killed there."""
        before = len(self.alive())
        (self._armed / point).touch()
        self.feed()
        until(lambda: len(self.alive()) < before, self.learners)

    def alive(self) -> list[int]:
        return [number for number in range(len(self.learners.processes)) if self.learners.alive(number)]

    def says(self, number: int, text: str) -> None:
        """Wait until a learner has said something."""
        until(lambda: text in self.learners.output(number), self.learners)

    def members(self) -> int:
        """Of the group, once it is stable; 0 before."""
        view = self.bus.group(policy.group(self.settings))
        return len(view.members) if view.stable else 0

    def trainer(self) -> int:
        """The learner that was the last rank of the newest version."""
        member = entries(self.bus, self.settings)[-1]["ranks"][-1]["member"]
        return next(n for n in self.alive() if f":{self.learners.port(n)}-" in member)

    def waits(self) -> list[str]:
        """What the workers that are alive say they wait for."""
        topic = full_name(self.settings.namespace, "workers")
        newest = {
            record.key: codec.decode_as("WorkerStatus", record.value)
            for record in self.bus.read(topic, 0)
            if record.value is not None
        }
        alive = [row for row in newest.values() if row["expires_at"] > now_micros()]
        return [row["error"] for row in alive if row["state"] == "starting" and row["error"]]

    def ledger(self) -> list[Mapping[str, Any]]:
        """The ledger: every group trained once, every sample and token counted once."""
        rows = entries(self.bus, self.settings)
        assert [row["version"] for row in rows] == list(range(len(rows)))
        for row in rows[1:]:
            assert [group["seq"] for group in row["groups"]] == list(range(row["seq_lo"], row["seq_hi"]))
            assert not any(group["lost"] for group in row["groups"])
            assert sum(share["samples"] for share in row["ranks"]) == 8
            assert sum(share["groups"] for share in row["ranks"]) == 4
            assert sum(share["tokens"] for share in row["ranks"]) == row["metrics"]["tokens_computed"]
        return rows

    def drift(self, place: Callable[..., Place]) -> float:
        """How far the newest weights are from those of one learner that trained the same, in this process."""
        whole = place(heads=HEADS)
        feed(whole.bus, whole.settings, range(4 * self._fed))
        whole.learn(self._fed)
        one, two = (
            checkpoint.read(next(policy.weights_root(it.settings).glob(f"v{self._fed}-*"))).weights
            for it in (self, whole)
        )
        return max(float((one[name].float() - two[name].float()).abs().max()) for name in two)

    def __enter__(self) -> Cells:
        self.learners.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.learners.__exit__(*error)
        self.bus.close()


def layout_of(row: Mapping[str, Any]) -> tuple[str, list[int], float]:
    """Layout, cell by rank, and spares."""
    return row["layout"], [share["cell"] for share in row["ranks"]], row["metrics"].get("spares", 0.0)


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

        it.learners.kill(it.trainer())
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
