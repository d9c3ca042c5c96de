"""Clients that hear nothing while others are answered: judged soundly, and replaced."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.infra.errors import UnreachableError
from millrace.infra.log.base import EARLIEST, Outgoing, TopicSpec
from millrace.infra.log.kafka import liveness
from millrace.infra.log.kafka.bus import KafkaBus
from millrace.infra.log.kafka.liveness import GAP_S, LOOK_S, SILENT_S, ClientWatcher, Pulse, Vigil
from millrace.infra.machine.broker import Broker
from millrace.infra.process.net import LOCALHOST


@dataclass
class Client:
    """Silent since a moment."""

    since: float
    limit_s: float = SILENT_S

    def silent_s(self, now: float) -> float:
        return now - self.since


STEPS = st.lists(st.tuples(st.sampled_from([LOOK_S, 3 * GAP_S]), st.booleans(), st.booleans()), min_size=1, max_size=80)


@given(STEPS)
def test_only_who_hears_nothing_while_we_run_and_others_are_answered_is_lost(
    steps: list[tuple[float, bool, bool]],
) -> None:
    """Steps of time (a long one: this process was frozen), whether others are answered, whether the client hears."""
    vigil, client = Vigil(), Client(0.0)
    now = fair_since = 0.0
    proofs = 0
    for took, answered, heard in steps:
        now += took
        if took > GAP_S:
            fair_since = now
        if heard:
            client.since = now
        suspects = vigil.suspects(now, [client])
        assert bool(suspects) == (now - max(client.since, fair_since) > SILENT_S)
        if not suspects:
            proofs = 0
            continue
        proofs = proofs + 1 if answered else 0
        fair_since = fair_since if answered else now
        assert vigil.are_lost(now, answered) == (proofs >= 2)


def test_a_client_that_nobody_asks_is_never_silent() -> None:
    now = [100.0]
    pulse = Pulse("x", clock=lambda: now[0])
    now[0] += 1000
    assert pulse.silent_s(now[0]) == 0
    pulse.note_wait()
    assert pulse.silent_s(now[0]) == 0, "the wait begins with the first question"
    for _ in range(30):
        now[0] += 1
        pulse.note_wait()
    assert pulse.silent_s(now[0]) == 30
    pulse.note_report('{"rx": 5}')
    assert pulse.silent_s(now[0]) == 0
    now[0] += 1
    pulse.note_report('{"rx": 5}')
    assert pulse.silent_s(now[0]) == 1, "the same count is no answer"


def test_a_call_that_never_returns_ends_the_process() -> None:
    now = [0.0]
    ended: list[int] = []
    watcher = ClientWatcher(lambda: True, ended.append)
    watcher.close()
    pulse = watcher.watch(Pulse("a call", liveness.HANGS_S, clock=lambda: now[0]))
    with pulse.calling():
        while now[0] < liveness.HANGS_S + 3 * LOOK_S:
            assert not ended or now[0] > liveness.HANGS_S
            now[0] += LOOK_S
            watcher.look(now[0])
    assert ended[0] == liveness.ENDS


class Forgetful:
    """Stands before a broker. Connections that are open when it `forgets` stay open and are answered no more."""

    def __init__(self) -> None:
        self.upstream = ("", 0)
        self._server = socket.create_server((LOCALHOST, 0))
        self.port = self._server.getsockname()[1]
        self._open: list[threading.Event] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def forget(self) -> None:
        for silent in self._open:
            silent.set()

    def close(self) -> None:
        self._server.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client = self._server.accept()[0]
                broker, silent = socket.create_connection(self.upstream), threading.Event()
                self._open.append(silent)
                for one, other in ((client, broker), (broker, client)):
                    threading.Thread(target=self._pass, args=(one, other, silent), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket, silent: threading.Event) -> None:
        with suppress(OSError):
            while data := one.recv(65536):
                if not silent.is_set():
                    other.sendall(data)
            other.close()


class Fronted(Broker):
    """A broker that sends its clients to another port."""

    def __init__(self, home: Path, front: int) -> None:
        super().__init__(home)
        self._front = front

    def configuration(self, port: int, controller: int) -> str:
        said = super().configuration(port, controller)
        return said + f"advertised.listeners=PLAINTEXT://{LOCALHOST}:{self._front}\n"


@pytest.fixture
def forgetful(tmp_path: Path) -> Iterator[tuple[Forgetful, KafkaBus]]:
    front = Forgetful()
    with Fronted(tmp_path, front.port) as broker:
        broker.prepare()
        front.upstream = (LOCALHOST, int(broker.bootstrap.rpartition(":")[2]))
        broker.start()
        # Left to itself, the library gives such a connection up after this time.
        with KafkaBus(f"{LOCALHOST}:{front.port}", {"socket.timeout.ms": 300_000}) as bus:
            bus.ensure_topics([TopicSpec("t", 2)])
            yield front, bus
    front.close()


def soon_answered(bus: KafkaBus, patch: pytest.MonkeyPatch) -> None:
    """The administration that the bus has now waits less long for the ends of topics than the bus does."""
    ask = bus.admin.list_offsets
    patch.setattr(bus.admin, "list_offsets", lambda *asked, **how: ask(*asked, **{**how, "request_timeout": 0.5}))


def soon_suspected(bus: KafkaBus) -> None:
    """Clients that the bus has now are suspected sooner. One that is heard reports it every `REPORT_MS`."""
    for pulse in bus._watcher._pulses:
        pulse.limit_s = min(pulse.limit_s, 4 * liveness.REPORT_MS / 1000)


@pytest.mark.slow
@pytest.mark.kafka
def test_a_broker_that_gives_no_answer_has_not_said_where_its_records_end(
    forgetful: tuple[Forgetful, KafkaBus], monkeypatch: pytest.MonkeyPatch
) -> None:
    front, bus = forgetful
    with bus.publisher() as publisher:
        publisher.publish(Outgoing("t", b"k", b"v", partition=0)).result(60)
    assert bus.ends("t") == {0: 1, 1: 0}
    front.forget()
    soon_answered(bus, monkeypatch)
    with pytest.raises(UnreachableError, match="no answer"):
        bus.ends("t")
    assert bus.ends("t") == {0: 1, 1: 0}, "the administration is made anew"


@pytest.mark.slow
@pytest.mark.kafka
def test_every_client_that_the_broker_forgot_is_made_anew(
    forgetful: tuple[Forgetful, KafkaBus], monkeypatch: pytest.MonkeyPatch
) -> None:
    front, bus = forgetful
    with bus.tail({("t", 0): EARLIEST, ("t", 1): EARLIEST}) as tail, bus.publisher() as publisher:
        gapless = bus.publisher(gapless=True)
        moved: list[set[int]] = []
        with bus.member("g", "t", on_revoke=moved.append) as member:
            publisher.publish(Outgoing("t", b"k", b"before", partition=0)).result(60)
            gapless.publish(Outgoing("t", b"k", b"gapless before", partition=1)).result(60)
            seen = {"tail": list[bytes](), "member": list[bytes]()}

            def until(done: Callable[[], bool]) -> None:
                deadline = time.monotonic() + 150
                while not done():
                    assert time.monotonic() < deadline, f"{seen}"
                    for name, reader in (("tail", tail), ("member", member)):
                        seen[name] += [record.value or b"" for record in reader.poll(100, 0.1)]

            until(lambda: all(len(found) == 2 for found in seen.values()) and member.assignment() == {0, 1})
            front.forget()
            soon_suspected(bus)
            lost = gapless.publish(Outgoing("t", b"k", b"gapless lost", partition=1))
            with pytest.raises(UnreachableError):
                publisher.publish(Outgoing("t", b"k", b"lost", partition=0)).result(150)
            with pytest.raises(UnreachableError):
                lost.result(150)
            with pytest.raises(UnreachableError, match="open another"):
                gapless.publish(Outgoing("t", b"k", b"never", partition=1)).result(60)
            gapless.close()
            publisher.publish(Outgoing("t", b"k", b"after", partition=0)).result(60)
            until(lambda: all(b"after" in found for found in seen.values()))
            assert seen["tail"] == [*seen["tail"][:2], b"after"], "from where it was, each record once"
            assert {0, 1} in moved, "the member was told that it owns nothing, before it joined again"
            soon_answered(bus, monkeypatch)
            with suppress(UnreachableError):  # the administration learns it by asking, and is made anew
                bus.ends("t")
            assert bus.ends("t")[0] >= 2
            assert [r.value for r in bus.read("t", 0)] == [b"before", b"after"]
