"""Learners of one layout as processes on a real broker, and what must hold of what they did."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from millrace.consumers import policy_names
from millrace.consumers.audit import audit
from millrace.infra.config import variables
from millrace.infra.log.kafka.bus import KafkaBus
from millrace.infra.log.topics import full_name
from millrace.schemas import codec
from millrace.schemas.ids import now_micros
from millrace.trainers.weights import checkpoint
from tests.support.feed import feed, settings_for, start_policy
from tests.support.learners import Learners, Place, entries, until, version

HEADS = 4
"""attention heads of the model, which two ranks can share"""


LEARNING = ("versions", "tiles", "ledger-chain", "consumed-once", "resolved-once", "staleness", "files")
"""laws of the audit"""


class Cells:
    """A policy and learners of one layout; `flags`: other settings. Use as a context."""

    def __init__(
        self, folder: Path, bootstrap: str, backend: str, flags: Mapping[str, Any] | None = None, **environment: str
    ) -> None:
        self._flags = dict(flags or {})
        chosen = {"learner.backend": backend, **self._flags}
        self.settings, file = settings_for(folder, bootstrap, f"t{uuid.uuid4().hex[:8]}", **chosen)
        self.bus = KafkaBus(bootstrap)
        start_policy(self.settings, self.bus, folder, heads=HEADS)
        self.learners = Learners(folder, file)
        self._armed = folder / "armed"
        self._environment = {**variables(chosen), **environment}
        self._fed = 0

    def start(self, count: int = 1) -> None:
        for _ in range(count):
            armed = self._armed / str(len(self.learners.processes))
            armed.mkdir(parents=True)
            self.learners.start(**self._environment, MILLRACE_KILL_DIR=str(armed))

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

    def dies(self, point: str, rank: int = 0) -> None:
        """Feed a batch, and wait until the learner that was this rank of the newest version is killed at `point`."""
        number = self.of(rank)
        (self._armed / str(number) / point).touch()
        self.feed()
        until(lambda: not self.learners.alive(number), self.learners)

    def alive(self) -> list[int]:
        return [number for number in range(len(self.learners.processes)) if self.learners.alive(number)]

    def says(self, number: int, text: str) -> None:
        """Wait until a learner has said something."""
        until(lambda: text in self.learners.output(number), self.learners)

    def members(self) -> int:
        """Of the group, once it is stable; 0 before."""
        view = self.bus.group(policy_names.group(self.settings))
        return len(view.members) if view.stable else 0

    def of(self, rank: int) -> int:
        """The learner that was this rank of the newest version."""
        member = entries(self.bus, self.settings)[-1]["ranks"][rank]["member"]
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

    def audit(self) -> None:
        """What the log says of learning holds, law by law; of agents, which there were none, it says nothing."""
        report = audit(self.bus, self.settings.namespace, self.settings.policy.name, files=True)
        for name in LEARNING:
            assert report.finding(name).checked
            assert report.finding(name).holds, report.finding(name)

    def drift(self, place: Callable[..., Place]) -> float:
        """How far any of the newest weights, a critic's too, is from that of one learner that trained the same, in this
        process."""
        whole = place(heads=HEADS, **self._flags)
        feed(whole.bus, whole.settings, range(4 * self._fed))
        whole.learn(self._fed)
        one, two = (
            checkpoint.read(next(policy_names.weights_root(it.settings).glob(f"v{self._fed}-*")))
            for it in (self, whole)
        )
        assert (one.critic is None) == (two.critic is None)
        pairs = [(one.weights, two.weights)]
        if one.critic is not None and two.critic is not None:
            pairs.append((one.critic.weights, two.critic.weights))
        return max(float((ours[n].float() - theirs[n].float()).abs().max()) for ours, theirs in pairs for n in theirs)

    def __enter__(self) -> Cells:
        self.learners.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.learners.__exit__(*error)
        self.bus.close()


def layout_of(row: Mapping[str, Any]) -> tuple[str, list[int], float]:
    """Layout, cell by rank, and spares."""
    return row["layout"], [share["cell"] for share in row["ranks"]], row["metrics"].get("spares", 0.0)
