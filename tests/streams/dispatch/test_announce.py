"""An edit of the settings file becomes a decision, once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.infra.config import Settings, load
from millrace.infra.connect import connect
from millrace.infra.log.base import Bus, Outgoing
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.memory.bus import MemoryBus
from millrace.infra.log.readable import readable
from millrace.infra.stages.decisions import AUTHOR, id_of
from millrace.schemas import codec
from millrace.schemas.records import Decision
from millrace.streams.dispatch.announce import announce, asked_by, share_of
from millrace.streams.dispatch.records import resolution
from millrace.streams.serve import dispatch_of
from tests.streams.dispatch.test_stage import Desk
from tests.support.odd import records
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


def decided(bus: Bus, namespace: str = "n") -> list[tuple[str, Any]]:
    """What this program decided, in order; its ids follow from what they say."""
    rows = [readable(Decision, record) for record in bus.read(f"{namespace}.decisions", 0)]
    return [(row["name"], json.loads(row["value"])) for row in rows if row is not None and row["id"] == id_of(row)]


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


NONE = [None, b"", b"torn", codec.MARK + b"short", codec.encode("Progress", {"stage": "s", "slot": 0, "time": 0})]
"""what is no record that these topics hold"""


def test_bytes_that_are_no_record_are_passed_over(bus: MemoryBus, tmp_path: Path) -> None:
    """Torn ones, another kind's and a claim, before and behind what counts."""
    claim = ClaimStore(str(tmp_path)).store("Progress", b"elsewhere")
    topics, values = ("decisions", "p.weights", "p.resolutions"), [*NONE, codec.encode("Claim", claim)]

    def litter() -> None:
        for topic in topics:
            for value in values:
                bus.publisher().publish(Outgoing(f"n.{topic}", b"p", value)).result()

    litter()
    assert announce(said(), bus) == []
    begin(bus)
    litter()
    assert [announce(one, bus) for one in (said(), said(policy__batch="7"), said())] == [[], ["batch"], ["batch"]]
    litter()
    assert announce(said(), bus) == []


@pytest.mark.parametrize("value", ["", "{", "[" * 100_000, "9" * 5000])
def test_a_setting_whose_value_is_none_is_passed_over(bus: MemoryBus, value: str) -> None:
    odd = {"id": "d", "kind": "setting", "policy": "p", "name": "batch", "value": value, "reason": "", "time": 0}
    begin(bus)
    write(bus, "decisions", "Decision", odd | {"author": AUTHOR})
    begun = {"name": "eta", "value": value, "from_seq": 0, "from_ticket": None, "decision": None}
    write(bus, "p.resolutions", "Resolution", resolution("setting", "p", 0) | {"setting": begun})
    assert announce(said(), bus) == []
    assert announce(said(policy__batch="7"), bus) == ["batch"]


def _clear(name: str, record: dict[str, Any]) -> dict[str, Any]:
    """An odd record that says nothing which this program could have said itself."""
    if name == "Decision":
        return {**record, "policy": "another"}
    if name == "Resolution":
        return {**record, "setting": None}
    return record if record["policy"] != "p" or record["version"] else {**record, "version": 3}


@given(st.data())
def test_whatever_lies_in_the_topics_dispatch_asks_for_what_the_file_says(data: st.DataObject) -> None:
    made = MemoryBus()
    made.ensure_topics(said().layout.specs())
    kinds = {"Decision": "decisions", "Resolution": "p.resolutions", "WeightVersion": "p.weights"}
    for name in data.draw(st.lists(st.sampled_from(sorted(kinds)), max_size=4)):
        write(made, kinds[name], name, _clear(name, data.draw(records(name))))
    begin(made)
    assert announce(said(), made) == []
    assert announce(said(policy__batch="7"), made) == ["batch"]
    # Where an odd one says what this program says, what is asked for may differ; that something is, may not.
    for name in data.draw(st.lists(st.sampled_from(sorted(kinds)), max_size=4)):
        ours = {"policy": "p", **({"author": AUTHOR, "kind": "setting"} if name == "Decision" else {})}
        write(made, kinds[name], name, data.draw(records(name)) | ours)
    announce(said(policy__batch="9"), made)
    assert [value for name, value in decided(made) if name == "batch"][-1] == 9


KILLED = """
import sys
from millrace.infra.config import load
from millrace.infra.connect import connect
from millrace.streams.dispatch.announce import announce

settings = load(flags=dict(flag.split("=") for flag in sys.argv[1:]))
with connect(settings) as bus:
    announce(settings, bus)
"""


@pytest.mark.slow
@pytest.mark.kafka
@pytest.mark.parametrize("passed", [1, 2])
def test_who_is_killed_between_two_decisions_asks_for_the_rest_at_the_next_start(
    broker: str, tmp_path: Path, passed: int
) -> None:
    here = {"namespace": f"killed{passed}", "kafka__bootstrap": broker, "kafka__local": "false", "home": str(tmp_path)}
    edits = {"policy__batch": "16", "policy__eta": "4", "policy__group_size": "4"}
    edited = said(**here, **edits)
    with connect(edited) as bus:
        bus.ensure_topics(edited.layout.specs())
        event = weights(0, "d") | {"batch": 2, "eta": 1, "group_size": 8}
        topic = f"{here['namespace']}.p.weights"
        bus.publisher().publish(Outgoing(topic, b"p", codec.encode_by_name("WeightVersion", event))).result()
        flags = FLAGS | {name.replace("__", "."): value for name, value in {**here, **edits}.items()}
        command = [sys.executable, "-c", KILLED, *(f"{name}={value}" for name, value in flags.items())]
        killed = {**os.environ, "MILLRACE_KILL": f"announce.asked:{passed}"}
        done = subprocess.run(command, env=killed, capture_output=True, timeout=120, cwd=tmp_path)
        assert done.returncode == -signal.SIGKILL, done.stderr
        names = ["batch", "eta", "group_size"]
        assert [name for name, _ in decided(bus, edited.namespace)] == names[:passed]
        subprocess.run(command, check=True, timeout=120, cwd=tmp_path)
        assert decided(bus, edited.namespace) == [("batch", 16), ("eta", 4), ("group_size", 4)]
        assert announce(edited, bus) == []


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
