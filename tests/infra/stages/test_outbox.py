"""Places of emits inside emits, order within a topic, claims."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millrace.infra.errors import StageError
from millrace.infra.log.base import Place
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.memory.bus import MemoryBus
from millrace.infra.stages.base import Emit, Later
from millrace.infra.stages.outbox import Outbox, encode_emit
from millrace.schemas import codec
from tests.support.counter import completion


def progress(topic: str, name: str, ref: str = "") -> Emit:
    return Emit(topic, "k", "Progress", {"stage": name, "slot": 0, "time": 0}, ref=ref)


def total(topic: str, *refs: str, ref: str = "") -> Emit:
    return Emit(topic, "k", "Completion", completion("complete", "g", 0, [Later(r) for r in refs]), ref=ref)


def sent(emits: list[tuple[int, Emit]], outbox: Outbox | None = None) -> MemoryBus:
    bus = MemoryBus({"ns.a": 1, "ns.b": 1})
    with bus.transactor("t") as transactor:
        transactor.begin()
        (outbox or Outbox("ns")).send(transactor, emits, b"s/0/7", [encode_emit(emit) for _, emit in emits])
        transactor.commit({}, None)
    return bus


def names(bus: MemoryBus, topic: str) -> list[str]:
    found = [codec.decode(record.value or b"")[1] for record in bus.read(topic, 0)]
    return [record.get("stage") or record["group"] for record in found]


def places(bus: MemoryBus, topic: str) -> list[list[Place]]:
    found = [codec.decode(record.value or b"") for record in bus.read(topic, 0)]
    return [[Place(**place) for place in r["trajectories"]] for name, r in found if name == "Completion"]


def test_places_are_filled_in_before_and_after_the_emit_they_name() -> None:
    bus = sent([(0, total("b", "x", "y")), (0, progress("a", "one", "x")), (0, progress("a", "two", "y"))])
    assert places(bus, "ns.b") == [[Place("ns.a", 0, 0), Place("ns.a", 0, 1)]]
    assert all(record.headers["turn"] == b"s/0/7" for record in bus.read("ns.b", 0))


def test_emits_to_one_topic_keep_their_order() -> None:
    bus = sent([(0, total("b", "x")), (1, progress("b", "after")), (0, progress("a", "one", "x"))])
    assert names(bus, "ns.b") == ["g", "after"]


def test_refs_hold_inside_one_record_only() -> None:
    pairs = [(scope, emit) for scope in (0, 2) for emit in (progress("a", str(scope), "x"), total("b", "x"))]
    assert places(sent(pairs), "ns.b") == [[Place("ns.a", 0, 0)], [Place("ns.a", 0, 1)]]
    with pytest.raises(StageError, match="no emit"):
        sent([(0, progress("a", "one", "x")), (1, total("b", "x"))])


def test_chains_of_places_are_followed_and_circles_refused() -> None:
    bus = sent([(0, total("b", "y")), (0, total("a", "x", ref="y")), (0, progress("a", "one", "x"))][::-1])
    assert places(bus, "ns.b") == [[Place("ns.a", 0, 1)]]
    with pytest.raises(StageError, match="wait for each other"):
        sent([(0, total("a", "y", ref="x")), (0, total("b", "x", ref="y"))])


def test_a_ref_names_one_emit() -> None:
    with pytest.raises(StageError, match="its own ref"):
        sent([(0, progress("a", "one", "x")), (0, progress("a", "two", "x"))])


def test_what_is_too_large_becomes_a_claim(tmp_path: Path) -> None:
    store = ClaimStore(str(tmp_path))
    large = progress("a", "n" * 500)
    bus = sent([(0, large)], Outbox("ns", store, largest=400))
    (record,) = bus.read("ns.a", 0)
    assert codec.name_of(record.value or b"") == "Claim"
    resolved: Any = store.resolve(record).value
    assert codec.decode_as("Progress", resolved) == large.record
    with pytest.raises(StageError, match="claims directory"):
        sent([(0, large)], Outbox("ns", None, largest=400))
