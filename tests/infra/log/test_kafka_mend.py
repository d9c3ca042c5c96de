"""Transactions that a broker decided and forgot to end: read from its log rightly, and ended after real kills."""

from __future__ import annotations

import socket
import struct
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from millrace.infra.errors import UnreachableError
from millrace.infra.log.base import LATEST, Outgoing, Record, TopicSpec, Transactor
from millrace.infra.log.kafka.bus import KafkaBus
from millrace.infra.log.kafka.mend import OFFSETS, ONGOING, PREPARE_ABORT, PREPARE_COMMIT, Decisions, Mender, Trail
from millrace.infra.log.kafka.wire import Open, Where
from millrace.infra.machine.broker import Broker

COMPLETE_COMMIT, EMPTY = 4, 0


def state(producer: int, status: int, *wheres: Where, version: int = 0) -> Record:
    """A record of the coordinator's log."""
    out = struct.pack(">hqhib", version, producer, 0, 10_000, status)
    if version:
        out += bytes([len(wheres) + 1])
        for topic, partition in wheres:
            out += bytes([len(topic) + 1]) + topic.encode() + bytes([2]) + struct.pack(">i", partition) + b"\0"
    else:
        out += struct.pack(">i", len(wheres))
        for topic, partition in wheres:
            out += struct.pack(">h", len(topic)) + topic.encode() + struct.pack(">ii", 1, partition)
    return Record("__transaction_state", 0, 0, b"\0\0\0\x01t", out + bytes(16), {}, 0)


def found(producer: int, where: Where) -> Open:
    return Open(where, producer, 0, 0, 5)


@pytest.mark.parametrize("version", [0, 1])
def test_the_last_decision_about_a_partition_counts(version: int) -> None:
    x, y = ("x", 0), ("y", 3)
    log = [
        state(7, PREPARE_COMMIT, x, y, version=version),
        state(7, COMPLETE_COMMIT, version=version),
        state(7, PREPARE_ABORT, y, version=version),
        state(7, EMPTY, version=version),
        state(8, PREPARE_COMMIT, x, version=version),
    ]
    decisions = Decisions(log)
    assert decisions.of(found(7, x)) is True
    assert decisions.of(found(7, y)) is False
    assert decisions.of(found(7, ("z", 0))) is None
    assert decisions.of(found(8, x)) is None  # the coordinator is still at it
    assert decisions.of(found(9, x)) is None


def test_an_open_transaction_is_left_alone() -> None:
    x = ("x", 0)
    assert Decisions([state(7, PREPARE_COMMIT, x), state(7, ONGOING, x)]).of(found(7, x)) is None


def test_brokers_that_do_not_know_the_requests_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """One that answers nothing but fetches, produces and this question."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        answer = struct.pack(">ihi", 1, 0, 3) + b"".join(struct.pack(">hhh", api, 0, 9) for api in (0, 1, 18))

        def serve() -> None:
            line, _ = server.accept()
            with line:
                line.recv(1000)
                line.sendall(struct.pack(">i", len(answer)) + answer)

        threading.Thread(target=serve, daemon=True).start()
        cluster = SimpleNamespace(brokers={1: SimpleNamespace(host=host, port=port)}, topics={})
        mender = Mender(lambda: cluster, lambda wheres: {}, list, "n.")
        assert not mender.can_mend()
        assert "do not answer requests [27, 61, 65]" in caplog.text
        mender.close()
        assert not mender.can_mend(), "asked once"


@pytest.mark.slow
@pytest.mark.kafka
@pytest.mark.timeout(900)
def test_kills_right_after_a_decision_hide_and_reveal_nothing(tmp_path: Path) -> None:
    with Broker(tmp_path / "broker") as broker:
        broker.start()
        with KafkaBus(broker.bootstrap, prefix="n.") as bus:
            bus.ensure_topics([TopicSpec("n.x", 3), TopicSpec("n.in", 1)])
            member = bus.member("n.g", "n.in", on_assign=lambda gained: dict.fromkeys(gained, LATEST))
            transactor = bus.transactor("n.t")
            expected: list[bytes] = []
            for number, commits in enumerate([True, False, True, True]):
                while not member.assignment():
                    member.poll(1, 0.1)
                transactor.begin()
                for partition in range(3):
                    transactor.send(Outgoing("n.x", b"", b"%d" % number, partition=partition))
                if commits:
                    transactor.commit({("n.in", 0): number + 1}, member.token())
                    expected.append(b"%d" % number)
                else:
                    transactor.flush()
                    transactor.abort()
                broker.kill()
                broker.start()
                settle(bus)
                assert [[r.value for r in bus.read("n.x", p)] for p in range(3)] == [expected] * 3
                member.close()
                member = bus.member("n.g", "n.in", on_assign=lambda gained: dict.fromkeys(gained, LATEST))
                while not member.assignment():
                    member.poll(1, 0.1)
                assert member.committed_offsets({0}) == {0: int(expected[-1]) + 1}
            transactor.close()
            member.close()


@pytest.mark.slow
@pytest.mark.kafka
@pytest.mark.timeout(900)
def test_a_new_owner_ends_what_its_id_left_before_it_writes(tmp_path: Path) -> None:
    with Broker(tmp_path / "broker") as broker:
        broker.start()
        with KafkaBus(broker.bootstrap, prefix="n.") as bus:
            bus.ensure_topics([TopicSpec("n.x", 3)])
            expected: list[bytes] = []
            for number, commits in enumerate([True, False, True]):
                with bus.transactor("n.t") as transactor:
                    assert all(bus.is_settled("n.x", p) for p in range(3))
                    assert [[r.value for r in bus.read("n.x", p)] for p in range(3)] == [expected] * 3
                    transactor.begin()
                    decide_and_kill(transactor, broker, number, expected, commits=commits)
            bus.transactor("n.t").close()
            assert [[r.value for r in bus.read("n.x", p)] for p in range(3)] == [expected] * 3


@pytest.mark.slow
@pytest.mark.kafka
@pytest.mark.timeout(900)
def test_an_owner_that_lives_on_begins_when_its_last_transaction_is_ended(tmp_path: Path) -> None:
    """Each is killed right after its decision and followed by one that is decided the other way."""
    with Broker(tmp_path / "broker") as broker:
        broker.start()
        with KafkaBus(broker.bootstrap, prefix="n.") as bus:
            bus.ensure_topics([TopicSpec("n.x", 3)])
            expected: list[bytes] = []
            transactor = bus.transactor("n.t")
            for number, commits in enumerate([True, False] * 2):
                try:
                    transactor.begin()
                except UnreachableError:
                    transactor.close()
                    transactor = bus.transactor("n.t")
                    transactor.begin()
                decide_and_kill(transactor, broker, number, expected, commits=commits)
            transactor.close()
            bus.transactor("n.t").close()
            assert [[r.value for r in bus.read("n.x", p)] for p in range(3)] == [expected] * 3


def decide_and_kill(
    transactor: Transactor, broker: Broker, number: int, expected: list[bytes], *, commits: bool
) -> None:
    """Write a number to three partitions, commit it (it is expected then) or abort, and kill the broker right away."""
    for partition in range(3):
        transactor.send(Outgoing("n.x", b"", b"%d" % number, partition=partition))
    transactor.flush()
    if commits:
        transactor.commit({}, None)
        expected.append(b"%d" % number)
    else:
        transactor.abort()
    broker.kill()
    broker.start()


def settle(bus: KafkaBus) -> None:
    """Mend until nothing moves."""
    deadline = time.monotonic() + 200
    quiet = 0
    while quiet < 4:
        assert time.monotonic() < deadline, "not settled"
        settled = bus.mend() == 0 and all(bus.is_settled("n.x", p) for p in range(3))
        quiet = quiet + 1 if settled else 0
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.kafka
def test_what_is_open_in_earnest_is_not_touched(broker: str) -> None:
    with KafkaBus(broker) as bus:
        bus.ensure_topics([TopicSpec("mend.open", 1)])
        with bus.transactor("mend.open") as transactor:
            transactor.begin()
            transactor.send(Outgoing("mend.open", b"", b"a", partition=0))
            transactor.flush()
            assert not bus.is_settled("mend.open", 0)
            for _ in range(3):
                assert bus.mend() == 0
            transactor.commit({}, None)
        deadline = time.monotonic() + 120
        while not bus.is_settled("mend.open", 0):
            assert time.monotonic() < deadline
        assert [record.value for record in bus.read("mend.open", 0)] == [b"a"]


@pytest.mark.slow
@pytest.mark.kafka
def test_a_trail_ends_where_the_transaction_does(broker: str) -> None:
    with KafkaBus(broker) as bus:
        bus.ensure_topics([TopicSpec("trail.x", 2), TopicSpec("trail.in", 1)])
        groups = ["t.g", "n660ba032a0.counter", "n1.seal", "a"]  # hashes of both signs
        mender = Mender(bus._cluster, bus._open_ends, bus._states, "trail.")
        with bus.transactor("trail.t") as transactor:
            producer = mender.producer_of("trail.t")
            assert producer is not None
            assert mender.can_mend()
            assert mender.producer_of("trail.nobody") is None
            for group in groups:
                trail = Trail(mender, "trail.t")
                with bus.member(group, "trail.in") as member:
                    while not member.assignment():
                        member.poll(1, 0.1)
                    transactor.begin()
                    transactor.send(Outgoing("trail.x", b"", b"a", partition=0))
                    transactor.flush()
                    trail.wrote("trail.x", 0)
                    trail.add_group(group)
                    assert mender.wheres_at_rest(producer, [("trail.x", 0), ("trail.x", 1), ("trail.gone", 0)]) == {
                        ("trail.x", 1)
                    }
                    assert ("trail.x", 0) in trail.open_wheres()
                    offsets = mender.offsets_of(group)
                    before = bus.ends(OFFSETS)[offsets[1]]
                    transactor.commit({("trail.in", 0): 0}, member.token())
                deadline = time.monotonic() + 120
                while trail.open_wheres():
                    assert time.monotonic() < deadline, trail.open_wheres()
                while not any(group.encode() in record.key for record in bus.read(*offsets, before)):
                    assert time.monotonic() < deadline, f"no offset of {group} in {offsets} from {before}"
        mender.close()
        assert mender.wheres_at_rest(producer, [("trail.x", 1)]) == {("trail.x", 1)}  # hung up, it calls again
