"""P6 and P8: a commit is whole or nothing, and nobody who was replaced commits."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.consumers.learner.step.leader import checkpoint_fault, commit_version
from millrace.infra import faults
from millrace.infra.errors import BusError, LedgerError, RefusedError
from millrace.infra.log.base import Member, MemberToken, Outgoing, TopicSpec, Transactor
from millrace.infra.log.history.ledger import chain_entry, entries
from millrace.infra.log.history.newest import Head, head
from millrace.infra.log.memory.bus import MemoryBus
from millrace.schemas import codec
from millrace.trainers.weights import checkpoint
from tests.support.fault_points import fault_points
from tests.support.versions import entry, weights

W, L, T = "n.p.weights", "n.p.ledger", "n.p.trajectories"
B = 2
SAMPLES = 2 * 30 * B
"""that lie there, so that every position that a learner of these tests commits is one of the log"""


class Killed(BaseException):
    """Stands in for SIGKILL."""


def world(*, fencing: bool = True) -> MemoryBus:
    bus = MemoryBus(fencing=fencing)
    bus.ensure_topics([TopicSpec(W, 1), TopicSpec(L, 1), TopicSpec(T, 2)])
    first = entry(0, 0, 0, b"")
    with bus.transactor("p") as transactor:
        transactor.begin()
        transactor.send(Outgoing(W, b"p", codec.encode("WeightVersion", weights(0, first["digest"]))))
        transactor.send(Outgoing(L, b"0", codec.encode("LedgerEntry", first)))
        for at in range(SAMPLES):
            transactor.send(Outgoing(T, b"", b"", partition=at % 2))
        transactor.commit({}, None)
    return bus


class Leader:
    """A learner that trains in no time: the next digest is a hash of the former and of the batch."""

    def __init__(self, bus: MemoryBus, name: str) -> None:
        self.bus = bus
        self.member: Member = bus.member("g", T, client_id=name)
        self.member.poll(1, 0)
        self.token: MemberToken = self.member.token()
        self.transactor: Transactor = bus.transactor("p")
        found = head(bus, W, L)
        assert found is not None
        self.head = found

    def step(self) -> None:
        at = self.head
        lo, hi = at.seq_hi, at.seq_hi + B
        digest = hashlib.sha256(f"{at.weights['digest']} {lo}..{hi}".encode()).hexdigest()
        row = chain_entry({**entry(at.version + 1, lo, hi, b""), "digest": digest}, at.entry["hash"])
        event = weights(at.version + 1, digest)
        commit_version(
            self.transactor, event, row, {(T, 0): hi, (T, 1): hi}, self.token, weights_topic=W, ledger_topic=L
        )
        self.head = Head(event, row)


def digests(bus: MemoryBus) -> list[str]:
    return [row["digest"] for row in entries(bus.read(L, 0))]


def train(bus: MemoryBus, versions: int) -> None:
    leader = Leader(bus, "again")
    while leader.head.version < versions:
        leader.step()


@given(st.lists(st.tuples(st.sampled_from(sorted(fault_points("consumers"))), st.integers(1, 4)), max_size=5))
@settings(max_examples=60, deadline=None)
def test_crashes_at_any_points_give_the_chain_of_no_crash(kills: list[tuple[str, int]]) -> None:
    whole = world()
    train(whole, 6)
    bus = world()
    for name, nth in kills:
        left = nth

        def hook(point: str, wanted: str = name) -> None:
            nonlocal left
            left -= point == wanted
            if left == 0:
                raise Killed

        before = faults.install(hook)
        try:
            train(bus, 6)
        except Killed:
            pass
        finally:
            faults.install(before)
    train(bus, 6)
    assert digests(bus) == digests(whole)
    assert [(row["seq_lo"], row["seq_hi"]) for row in entries(bus.read(L, 0))][1:] == [
        (B * k, B * k + B) for k in range(6)
    ]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30))
@settings(max_examples=60, deadline=None)
def test_zombies_never_commit(turns: list[int]) -> None:
    """Three processes; each either steps or, refused, takes over by joining again. Zombies step on stale heads."""
    bus = world()
    leaders: dict[int, Leader] = {}
    for who in turns:
        if who not in leaders:
            leaders[who] = Leader(bus, f"l{who}")
            continue
        try:
            leaders[who].step()
        except BusError:
            del leaders[who]
    rows = list(entries(bus.read(L, 0)))
    assert [row["version"] for row in rows] == list(range(len(rows)))


def test_without_fences_a_zombie_breaks_the_ledger() -> None:
    bus = world(fencing=False)
    old = Leader(bus, "old")
    train(bus, 2)
    old.step()
    with pytest.raises(LedgerError):
        list(entries(bus.read(L, 0)))


def test_a_member_that_never_joined_is_refused_before_anything_is_sent() -> None:
    bus = world()
    leader = Leader(bus, "l")
    leader.token = MemberToken("g", -1, "")
    with pytest.raises(RefusedError, match="never joined"):
        leader.step()
    assert len(digests(bus)) == 1


def test_every_point_of_a_checkpoint_has_a_name_here() -> None:
    named = [name for name in fault_points("consumers") if name.startswith("checkpoint.")]
    before = faults.install(None)
    try:
        for name in named:
            checkpoint_fault(name)
    finally:
        faults.install(before)
    with pytest.raises(ValueError, match="no name"):
        checkpoint_fault("checkpoint.new")


def test_the_list_of_points_is_that_of_the_code() -> None:
    text = Path(checkpoint.__file__).read_text()
    for name in (n for n in fault_points("consumers") if n.startswith("checkpoint.")):
        assert f'"{name}"' in text
    assert text.count('fault("checkpoint.') == sum(n.startswith("checkpoint.") for n in fault_points("consumers"))
