"""An edit of the settings file becomes a decision, once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millrace.infra.config import Settings, load
from millrace.infra.log.base import Outgoing
from millrace.infra.log.memory.bus import MemoryBus
from millrace.infra.stages.decisions import id_of
from millrace.schemas import codec
from millrace.streams.dispatch.announce import announce, asked_by, share_of
from millrace.streams.dispatch.records import resolution
from millrace.streams.serve import dispatch_of
from tests.streams.dispatch.test_stage import Desk
from tests.support.versions import weights

FLAGS = {"namespace": "n", "policy.name": "p", "policy.batch": "2", "policy.eta": "1"}


def said(**flags: str) -> Settings:
    return load(flags=FLAGS | {name.replace("__", "."): value for name, value in flags.items()})


@pytest.fixture
def bus() -> MemoryBus:
    made = MemoryBus()
    made.ensure_topics(said().layout.specs())
    return made


def write(bus: MemoryBus, topic: str, name: str, record: Any) -> None:
    bus.publisher().publish(Outgoing(f"n.{topic}", b"p", codec.encode(name, record))).result()


def begin(bus: MemoryBus) -> None:
    write(bus, "p.weights", "WeightVersion", weights(0, "d") | {"batch": 2, "eta": 1, "group_size": 8})


def decided(bus: MemoryBus) -> list[tuple[str, Any]]:
    rows = [codec.decode_as("Decision", record.value or b"") for record in bus.read("n.decisions", 0)]
    return [(row["name"], json.loads(row["value"])) for row in rows]


def test_nothing_is_asked_for_before_version_0(bus: MemoryBus) -> None:
    assert announce(said(policy__batch="7"), bus) == []


def test_an_edit_is_asked_for_once(bus: MemoryBus) -> None:
    begin(bus)
    edited = said(policy__batch="16", policy__eta="4")
    assert [announce(one, bus) for one in (said(), edited, edited, said(policy__batch="16"))] == [
        [],
        ["batch", "eta"],
        [],
        ["eta"],
    ]
    assert decided(bus) == [("batch", 16), ("eta", 4), ("eta", 1)]


def test_a_decision_is_named_for_what_it_says(bus: MemoryBus) -> None:
    begin(bus)
    announce(said(policy__batch="16", policy__eta="4"), bus)
    records = list(bus.read("n.decisions", 0))
    made = [codec.decode_as("Decision", record.value or b"") for record in records]
    assert [(one["id"], record.key) for one, record in zip(made, records, strict=True)] == [
        (id_of(one), b"p") for one in made
    ]


def test_what_somebody_else_decided_stands_until_the_next_edit(bus: MemoryBus) -> None:
    begin(bus)
    assert announce(said(policy__batch="16"), bus) == ["batch"]
    other = {"id": "d", "kind": "setting", "policy": "p", "name": "batch", "value": "8", "reason": "", "time": 0}
    write(bus, "decisions", "Decision", other | {"author": "somebody"})
    assert announce(said(policy__batch="16"), bus) == []
    assert announce(said(policy__batch="32"), bus) == ["batch"]


def test_what_dispatch_began_with_is_known_from_its_own_words(bus: MemoryBus) -> None:
    begin(bus)
    for name, value in asked_by(said(policy__lease_s="7")).items():
        setting = {"name": name, "value": json.dumps(value), "from_seq": 0, "from_ticket": None, "decision": None}
        write(bus, "p.resolutions", "Resolution", resolution("setting", "p", 0) | {"setting": setting})
    assert announce(said(policy__lease_s="7"), bus) == []
    assert announce(said(policy__lease_s="9"), bus) == ["lease_ms"]
    assert decided(bus) == [("lease_ms", 9000)]


def test_another_group_size_is_asked_for_once(bus: MemoryBus) -> None:
    """Version 0 says what the policy began with; dispatch says it nowhere."""
    begin(bus)
    edited = said(policy__group_size="4")
    assert [announce(one, bus) for one in (said(), edited, edited, said())] == [[], ["group_size"], [], ["group_size"]]
    assert decided(bus) == [("group_size", 4), ("group_size", 8)]


def test_dispatch_takes_every_name_that_is_asked_for() -> None:
    desk = Desk(batch=2, eta=1)
    for name, value in asked_by(said(policy__batch="3", policy__unsolicited_share="0.5")).items():
        desk.decide(name, value)
    assert desk.reasons == []


def test_production_traffic_alone_fills_the_whole_batch(tmp_path: Path) -> None:
    """A share of a quarter leaves room for fewer groups than a batch: nothing would ever train."""
    alone = said(policy__unsolicited_share="0.25")
    beside = said(policy__unsolicited_share="0.25", rollout__agent="my_agent:agent")
    assert [share_of(one) for one in (alone, beside, said())] == [1.0, 0.25, 0.0]
    assert dispatch_of(alone)._terms.unsolicited_share == 1.0
