"""Turns fold again to what they wrote, and anything else is named."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from millrace.infra.errors import ReplayError
from millrace.infra.log.base import Outgoing, Record
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.stages.base import Emit, Op, View
from millrace.infra.stages.replay import refold, turns, verify
from millrace.schemas import codec
from millrace.testing.world import CALM, NAMESPACE, World
from tests.support.counter import Counter

TOPICS = {"in": 1, "side": 1, "out": 2, "sums": 1}


@pytest.fixture
def world() -> World:
    """Some turns of the counter, at rest."""
    with World(1, TOPICS, [Counter], chances=CALM, workers=1) as found:
        for n in range(30):
            found.send("in", f"k{n % 4}", "", b"", source="g", headers={"time": str(n * 1_000_000)})
            if n % 7 == 0:
                found.send("side", "", "", b"")
            found.chaos(2)
        found.drain()
    return found


def test_a_slot_is_folded_again(world: World) -> None:
    recorded = list(turns(world.bus, "counter", NAMESPACE, 0))
    assert verify(world.bus, Counter(), NAMESPACE, 0) == len(recorded) > 5
    last = list(refold(world.bus, Counter(), NAMESPACE, 0))[-1]
    assert (last.record, last.turn) == recorded[-1]
    assert last.state.get("count/k0") == 8


class Changed(Counter):
    """Counts by two."""

    def on_record(self, view: View, record: Record, now: int) -> Iterable[Op]:
        for op in super().on_record(view, record, now):
            if isinstance(op, Emit) and op.name == "Progress":
                yield Emit(op.topic, op.key, op.name, {**op.record, "slot": op.record["slot"] * 2}, ref=op.ref)
            else:
                yield op


def test_another_stage_is_another_history(world: World) -> None:
    with pytest.raises(ReplayError, match=r"turn 0 of counter\[0\] wrote another Progress"):
        verify(world.bus, Changed(), NAMESPACE, 0)


def write(world: World, topic: str, value: bytes, headers: dict[str, bytes], key: bytes = b"k0") -> None:
    with world.bus.publisher() as publisher:
        publisher.publish(Outgoing(f"{NAMESPACE}.{topic}", key, value, headers, 0)).result()


def test_a_forged_output_is_found(world: World) -> None:
    forged = codec.encode("Progress", {"stage": "k0", "slot": 99, "time": 0})
    write(world, "out", forged, {"turn": b"counter/0/3"})
    with pytest.raises(ReplayError, match=r"turn 3 .* does not give when replayed"):
        verify(world.bus, Counter(), NAMESPACE, 0)


def test_an_output_of_no_turn_is_found(world: World) -> None:
    forged = codec.encode("Progress", {"stage": "k0", "slot": 99, "time": 0})
    write(world, "out", forged, {"turn": b"counter/0/999"})
    with pytest.raises(ReplayError, match=r"turns \[999\], which were never recorded"):
        verify(world.bus, Counter(), NAMESPACE, 0)


def test_a_lost_output_is_found(world: World) -> None:
    world.bus.delete_before(f"{NAMESPACE}.sums", 0, 1)
    with pytest.raises(ReplayError, match=r"turn 6 .* Completion"):
        verify(world.bus, Counter(), NAMESPACE, 0)


def test_a_forged_state_is_found(world: World) -> None:
    change = codec.encode("Change", {"slot": 0, "key": "count/k0", "value": b"\x01"})
    write(world, "changelog.counter", change, {}, b"0/count/k0/")
    with pytest.raises(ReplayError, match="the changelog differs"):
        verify(world.bus, Counter(), NAMESPACE, 0)


def test_inputs_and_turns_that_are_gone_are_named(world: World) -> None:
    world.bus.delete_before(f"{NAMESPACE}.in", 0, 1)
    with pytest.raises(ReplayError, match=r"turn 0 of counter\[0\] cannot be read again from in"):
        verify(world.bus, Counter(), NAMESPACE, 0)
    world.bus.delete_before(f"{NAMESPACE}.turns.counter", 0, 1)
    with pytest.raises(ReplayError, match="turn 0 is gone"):
        verify(world.bus, Counter(), NAMESPACE, 0)


def test_claims_are_looked_through(world: World, tmp_path: Path) -> None:
    store = ClaimStore(str(tmp_path))
    log = world.bus.logs[f"{NAMESPACE}.out"][0]
    at, record = next((n, r) for n, r in enumerate(log.entries) if r is not None)
    claim = codec.encode("Claim", store.store("Progress", record.value or b""))
    log.entries[at] = Record(record.topic, 0, at, record.key, claim, record.headers, record.timestamp)
    assert verify(world.bus, Counter(), NAMESPACE, 0, store) > 5
