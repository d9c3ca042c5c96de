"""What the demo does: its settings, and which process dies or joins at which version.

Pure. The full demo kills a learner, starts a third, and kills the dispatcher; the short one kills one learner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

NAMESPACE = "demo"


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """At `version`: kill -9 the program `name`, or start it (it must be one that the fleet does not run yet)."""

    version: int
    kind: Literal["kill", "join"]
    name: str

    def is_due(self, version: int, waiting_groups: int, batch: int) -> bool:
        """Whether its moment has come. `waiting_groups`: groups that no version has consumed.

        A learner dies while the step that it takes part in is under way, the worst moment for it; at any other the next
        version waits for agents, dead learner or not."""
        return version >= self.version and (not self.learner or version > self.version or waiting_groups >= batch)

    @property
    def learner(self) -> bool:
        """Whether it kills a learner."""
        return self.kind == "kill" and self.name.startswith("learn")


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """One demo. `gain`: least rise of the mean reward, last ten versions over first ten; None asks for none; `minutes`:
    when it gives up, twice as long as two quiet cores take and more."""

    versions: int
    faults: Sequence[PlannedFault]
    gain: float | None
    minutes: float


FULL_DEMO = DemoPlan(
    versions=60,
    faults=(
        PlannedFault(12, "kill", "learn-1"),
        PlannedFault(20, "join", "learn-2"),
        PlannedFault(30, "kill", "dispatch"),
    ),
    gain=0.30,
    minutes=30,
)
SHORT_DEMO = DemoPlan(versions=10, faults=(PlannedFault(4, "kill", "learn-1"),), gain=None, minutes=10)


def flags(home: Path, seed: int, ports: Sequence[int], kind: str | None = None) -> Mapping[str, object]:
    """Settings of the demo, by dotted name. `ports`: free ones for broker, gateway, engine and warehouse. kind: of
    engine, where it is not the usual one."""
    broker, gateway, engine, warehouse = ports
    return {
        **({"engine.kind": kind} if kind else {}),
        "namespace": NAMESPACE,
        "home": str(home),
        "kafka.bootstrap": f"127.0.0.1:{broker}",
        "kafka.sync": False,  # a demo that loses its power begins anew
        "topics.slots": 2,
        "topics.shards": 6,
        "policy.name": "sort",
        "policy.batch": 48,
        "policy.eta": 1,
        "policy.group_size": 8,
        "policy.lease_s": 120,
        "gateway.port": gateway,
        "engine.url": f"http://127.0.0.1:{engine}",
        "engine.max_model_len": 64,
        "engine.max_num_seqs": 64,
        "engine.kv_cache_mb": 64,
        "rollout.agent": "millrace.apps.demo.sort_agent:agent",
        "rollout.tasks": str(home / "tasks.jsonl"),
        "rollout.concurrency": 48,
        "rollout.ahead": 256,
        "reward.verifier": "exact",
        "learner.algorithm": "grpo",
        "learner.lr": 3e-4,
        "learner.minibatches": 2,
        "learner.learners": 2,
        "learner.seed": seed,
        "warehouse.port": warehouse,
    }


def gain(rewards: Sequence[float], window: int = 10) -> float:
    """Mean of the last `window` versions' rewards less that of the first; 0 when there are too few to compare."""
    if len(rewards) < 2 * window:
        return 0.0
    return sum(rewards[-window:]) / window - sum(rewards[:window]) / window
