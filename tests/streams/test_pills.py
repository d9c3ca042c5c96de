"""Events that could stop a stage for ever, on a real broker with the real stages: each ends as a dead letter, and the
next tenant's episode is sealed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.consumers.audit.run import audit
from millrace.infra.config import load
from millrace.infra.log.base import Outgoing, Place
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.kafka.bus import KafkaBus
from millrace.infra.log.topics import full_name
from millrace.schemas import bounds, codec
from millrace.schemas.ids import new_id
from millrace.testing.events import Episode
from tests.streams.test_serve import PROGRAM, ROOT
from tests.support.players import Plan, version_zero

pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.timeout(900)]

PATIENCE_S = 240
TOKEN = "ghp_16C7e42F292c6912E7710c838347Ae178B4a"
DEEP = "[" * 600 + "]" * 600


def started(root: str, **body: Any) -> dict[str, Any]:
    """A start whose body holds what it should not."""
    episode = Episode(root, policy="pilot")
    return episode.event("episode_started", {**episode._start, **body})


def secrets(root: str, count: int) -> dict[str, Any]:
    """A tool's result: a JSON list of so many strings, each with a secret."""
    body = {"call_id": "c", "name": "f", "status": "ok", "content": json.dumps([TOKEN] * count), "latency_us": 1}
    return Episode(root, policy="pilot").event("tool_result", body)


PILLS: dict[str, tuple[dict[str, Any], str | None]] = {
    "nested": (Episode("nested", policy="pilot", task=DEEP).start(), None),
    "deadline": (started("deadline", reward_deadline_ms=9_000_000_000_000_000_000), "out_of_bounds"),
    "micros": (started("micros", reward_deadline_ms=9_300_000_000_000_000), "out_of_bounds"),
    "task": (started("task", task_id="x" * 1_500_000), "out_of_bounds"),
    "label": (
        Episode("label", policy="pilot").event(
            "security_label", {"classification": "internal", "labels": ["y" * 1_500_000], "scopes": []}
        ),
        "out_of_bounds",
    ),
    "attempt": (Episode("attempt", policy="pilot", attempt="x" * 1_500_000).start(), "out_of_bounds"),
    "awaits": (started("awaits", awaits=["x" * 1_500_000]), "out_of_bounds"),
    "secrets": (secrets("secrets", bounds.HITS - 1), None),
    "flood": (secrets("flood", 4 * bounds.HITS), None),
    "size": (started("size", group_size=2**31 - 1), "out_of_bounds"),
    "beyond": (started("beyond", group_size=2**40), "out_of_bounds"),
}
ODD = {"id": "d", "kind": "setting", "policy": "pilot", "name": "batch", "value": "[" * 100_000, "reason": ""} | {
    "author": "millrace", "time": 0,
}  # fmt: skip
"""root of the event to the event and the reason of its dead letter (None: it may be taken, or be none)"""


Started = tuple[KafkaBus, Any, list[subprocess.Popen[bytes]], set[Place]]
"""the log, its settings, the stages and what lay in the topics before they started"""


@pytest.fixture
def stages(broker: str, tmp_path: Path) -> Iterator[Started]:
    namespace = f"s{new_id()[-12:]}"
    config = tmp_path / "millrace.toml"
    config.write_text(
        f'namespace = "{namespace}"\nhome = "{tmp_path}"\n[kafka]\nbootstrap = "{broker}"\n[policy]\nname = "pilot"\n'
    )
    settings = load(config)
    (tmp_path / "stage.py").write_text(PROGRAM)
    with KafkaBus(broker) as bus:
        bus.ensure_topics(settings.layout.specs())
        strewn = litter(bus, settings)
        processes = [
            subprocess.Popen(
                [sys.executable, str(tmp_path / "stage.py"), f"run_{name}", str(config)],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
            for name in ("refine", "seal", "dispatch")
        ]
        try:
            yield bus, settings, processes, strewn
        finally:
            for process in processes:
                process.kill()
                process.wait()


def litter(bus: KafkaBus, settings: Any) -> set[Place]:
    """What is no record, and what makes no sense, where a stage reads before it starts."""
    claim = ClaimStore(settings.claims).store("Progress", b"elsewhere")
    bytes_ = [None, b"", b"torn", codec.MARK + b"short", codec.encode("Claim", claim)]
    with bus.publisher() as publisher:
        published = [
            publisher.publish(Outgoing(full_name(settings.namespace, topic), b"pilot", value))
            for topic in ("decisions", "pilot.weights", "pilot.resolutions")
            for value in [*bytes_, codec.encode("Decision", ODD)]
        ]
        publisher.flush()
    return {one.result() for one in published}


def test_every_pill_is_a_dead_letter_and_the_next_episode_is_sealed(
    stages: Started,
) -> None:
    bus, settings, processes, strewn = stages
    policy, raw = settings.policy.name, full_name(settings.namespace, "raw")
    store = ClaimStore(settings.claims)
    event, entry = version_zero(Plan(None, 1, 1, 1, 2, "reserve", 0.0, "drop", policy=policy))  # type: ignore[arg-type]
    event["shards"] = settings.topics.shards
    good = Episode("good", tenant="bob", policy=policy)
    goods = [good.start(), good.call("a"), good.end(), good.reward(1.0, judge=None)]
    with bus.transactor(f"{settings.namespace}.zero") as transactor:
        transactor.begin()
        for name, key, record in (
            ("weights", policy, ("WeightVersion", event)),
            ("ledger", "0", ("LedgerEntry", entry)),
        ):
            topic = full_name(settings.namespace, f"{policy}.{name}")
            transactor.send(Outgoing(topic, key.encode(), codec.encode(*record)))
        transactor.commit({}, None)
    with bus.publisher() as publisher:
        for one in [pill for pill, _ in PILLS.values()] + goods:
            value = store.fitting("Event", codec.encode("Event", one))
            publisher.publish(Outgoing(raw, f"{one['tenant']}/{one['group']}".encode(), value))
        publisher.flush()
    (trajectory,) = wait(bus, settings, f"{policy}.trajectories", "Trajectory", store)
    assert (trajectory["id"], trajectory["reward"]) == ("good", 1.0)
    assert [process.poll() for process in processes] == [None] * 3, "no stage has ended"
    # How many letters come is not said: one event may have several, and that without a reason here one or none.
    missing = {(root, reason) for root, (_, reason) in PILLS.items() if reason}
    count = 0
    while missing:
        letters = wait(bus, settings, "dead-letters", "DeadLetter", store, count + 1)
        count = len(letters)
        missing -= {(letter["trajectory"], letter["reason"]) for letter in letters}
    events = full_name(settings.namespace, "events")
    values = [record.value or b"" for p in range(bus.partitions(events)) for record in bus.read(events, p)]
    decoded = [codec.decode(store.behind(value)) for value in values]
    governed = {record["root_trajectory"]: record for name, record in decoded if name == "Event"}
    for root in ("secrets", "flood"):
        assert TOKEN.encode() not in governed[root]["body"]
    report = audit(bus, settings.namespace, policy, resolve=store.resolve, release="reserve")
    # The audit names what was strewn, and nothing else.
    broken = [one for finding in report.findings if not finding.holds for one in finding.violations]
    assert [one for one in broken if not one.records or not strewn.issuperset(one.records)] == []
    assert {place for one in broken for place in one.records} == strewn


def wait(
    bus: KafkaBus, settings: Any, topic: str, name: str, store: ClaimStore, count: int = 1
) -> list[dict[str, Any]]:
    """The records of a topic, once there are `count`."""
    full, deadline = full_name(settings.namespace, topic), time.monotonic() + PATIENCE_S
    while True:
        values = [record.value or b"" for p in range(bus.partitions(full)) for record in bus.read(full, p)]
        if len(values) >= count:
            return [codec.decode_as(name, store.behind(value)) for value in values]
        assert time.monotonic() < deadline, f"{topic} holds {len(values)} of {count} records"
        time.sleep(0.1)
