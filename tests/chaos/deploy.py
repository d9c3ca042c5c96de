"""Brings up the small deployment that chaos breaks: two learners, short batches, the sort task."""

from __future__ import annotations

from pathlib import Path

from millrace.apps.demo import run
from millrace.apps.demo.fleet import BROKER
from millrace.apps.demo.plan import flags
from millrace.apps.demo.run import make_topics
from millrace.infra.config import load
from millrace.infra.process.net import free_ports
from tests.chaos.arena import Arena, fleet_of, write_settings
from tests.chaos.ways import SETTINGS

SMALL = {"policy.batch": 2, "policy.group_size": 2}
"""the least of which a version is made where learners share it: faults are paid for, and not episodes between them"""


def deploy(home: Path, seed: int, engine: str, way: str = "", **more: object) -> Arena:
    """A running deployment in `home`, version 0 written. Small batches make quick versions: faults can be many. `way`:
    of `ways.WAYS`, by which versions reach the engine (default: through their directories, whole); `more`: settings by
    dotted name."""
    values = dict(flags(home, seed, free_ports(4))) | {
        "namespace": "chaos",
        "kafka.sync": True,
        "engine.kind": engine,
        "policy.batch": 8,
        "policy.group_size": 4,
        "policy.lease_s": 30,
        "policy.reward_deadline_s": 20,
        "policy.short_groups": "top-up",
        "rollout.ahead": 64,
        "rollout.concurrency": 16,
        "rollout.timeout_s": 30,
        "warehouse.enabled": False,  # its kills are rehearsed beside it
        **SETTINGS.get(way, {}),
        **more,
    }
    file = write_settings(home, values)
    settings = load(file)
    fleet = fleet_of(home)
    fleet.down()
    fleet.up((BROKER,))
    make_topics(settings)
    run.warm_start(home, seed, target=0.0)
    run.create_policy(settings)
    arena = Arena(home, seed)
    arena.fleet.up()
    return arena
