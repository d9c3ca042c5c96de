"""faust, at least once: killed in the middle, nothing that was not answered counts as done."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.infra.errors import ConfigError, TooLargeError, UnreachableError
from millrace.infra.log.base import Outgoing, Record, TopicSpec, Transactor
from millrace.infra.log.kafka.bus import KafkaBus
from millrace.infra.machine.broker import Broker
from millrace.schemas import codec
from millrace.schemas.ids import new_id
from millrace.streams.reward.agents import AnswerMarks, _deliver, credentials
from millrace.testing.events import Episode

ROOT = Path(__file__).parents[3]
COUNT = 600
FROZEN_S = 12.0
ROUND = 200
"""episodes that end before each kill, so that it comes in the middle of some, however late the one before came"""


def start(*arguments: str) -> subprocess.Popen[bytes]:
    script = Path(__file__).with_name("worker.py")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, str(script), *arguments], env=environment)


@pytest.mark.slow
@pytest.mark.kafka
def test_no_verdict_is_lost_under_kills_and_a_graceful_stop(broker, tmp_path):
    namespace = f"r{new_id()[-12:]}"
    events, raw = f"{namespace}.events", f"{namespace}.raw"
    arguments = (broker, namespace, str(tmp_path))
    with KafkaBus(broker) as bus:
        bus.ensure_topics([TopicSpec(events, 2), TopicSpec(raw, 2)])
        targets = {f"root-{n}" for n in range(COUNT)}
        transactor = bus.transactor(f"{namespace}.refine")
        transactor.begin()  # what was aborted is judged by nobody
        transactor.send(_ended(events, Episode("aborted")))
        transactor.flush()
        transactor.abort()
        process = start(*arguments)
        try:
            for first, kill in zip(
                range(0, COUNT, ROUND), (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM), strict=True
            ):
                before = len(judged(bus, raw))
                end_episodes(transactor, events, range(first, first + ROUND))
                wait(lambda before=before: len(judged(bus, raw)) > before + 20)
                process.send_signal(kill)
                process.wait(120)
                process = start(*arguments)
            wait(lambda: judged(bus, raw) == targets, 120)
        finally:
            process.kill()
            process.wait()
            transactor.close()


@pytest.mark.slow
@pytest.mark.kafka
@pytest.mark.timeout(600)
def test_a_judge_that_was_frozen_with_its_broker_judges_on(tmp_path: Path) -> None:
    """Longer than its session lasts, and thawed in either order. librdkafka's clients can fall silent by this; faust's
    ignores an answer that names no broker, and so keeps those that it knew."""
    namespace = "frozen"
    events, raw = f"{namespace}.events", f"{namespace}.raw"
    with Broker(tmp_path / "broker") as broker:
        broker.start()
        process = start(broker.bootstrap, namespace, str(tmp_path))
        assert broker.pid
        both = [process.pid, broker.pid]
        try:
            for number, order in enumerate((both, both[::-1], [])):
                with KafkaBus(broker.bootstrap) as bus:
                    _thawed(lambda bus=bus: bus.ensure_topics([TopicSpec(events, 2), TopicSpec(raw, 2)]))
                    with bus.transactor(f"{namespace}.refine") as transactor:
                        end_episodes(transactor, events, range(50 * number, 50 * number + 50))
                    targets = {f"root-{n}" for n in range(50 * number + 50)}
                    wait(lambda bus=bus, targets=targets: judged(bus, raw) == targets, 120)
                for pid in order:
                    os.kill(pid, signal.SIGSTOP)
                time.sleep(FROZEN_S if order else 0)
                for pid in order:
                    os.kill(pid, signal.SIGCONT)
        finally:
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.kafka
def test_a_restart_judges_nothing_again_however_many_transactions_were_read(broker, tmp_path):
    namespace = f"r{new_id()[-12:]}"
    events, raw = f"{namespace}.events", f"{namespace}.raw"
    with KafkaBus(broker) as bus:
        bus.ensure_topics([TopicSpec(events, 2), TopicSpec(raw, 2)])
        transactor = bus.transactor(f"{namespace}.refine")
        process = start(broker, namespace, str(tmp_path))
        try:
            end_episodes(transactor, events, range(100), each=1)  # a hole behind every event
            wait(lambda: len(judged(bus, raw)) == 100)
            process.send_signal(signal.SIGTERM)
            process.wait(120)
            process = start(broker, namespace, str(tmp_path))
            end_episodes(transactor, events, range(100, 104), each=1)
            wait(lambda: len(judged(bus, raw)) == 104)
            assert sum(1 for partition in range(2) for _ in bus.read(raw, partition)) == 104
        finally:
            process.kill()
            process.wait()
            transactor.close()


def _thawed(ask: Callable[[], None]) -> None:
    """Ask until the broker, which may have been frozen until now, answers."""
    for _ in range(4):
        with suppress(UnreachableError):
            return ask()
    ask()


class Refusing:
    """A publisher whose log refuses what `refuses` says, and is away for the first try."""

    def __init__(self, refuses) -> None:
        self._refuses = refuses
        self._away = True
        self.taken: list[Outgoing] = []

    def publish(self, out: Outgoing) -> Future[None]:
        future: Future[None] = Future()
        if self._away:
            self._away = False
            future.set_exception(UnreachableError("away"))
        elif self._refuses(out):
            future.set_exception(TooLargeError("a record of 9 bytes. Store the record as a claim."))
        else:
            self.taken.append(out)
            future.set_result(None)
        return future


class Named:
    async def __call__(self, record):
        return Outgoing("raw", b"k", b"a verdict of any size")

    def too_large(self, record):
        return Outgoing("raw", b"k", b"too_large")


EVENT = Record("ns.events", 1, 7, b"k", b"", {}, 0)


async def test_a_verdict_that_the_log_never_takes_ends_as_its_failure():
    publisher, answer = Refusing(lambda out: len(out.value or b"") > 9), Named()
    await asyncio.wait_for(_deliver(publisher, answer, EVENT, await answer(EVENT)), 60)
    assert [out.value for out in publisher.taken] == [b"too_large"]


async def test_a_failure_that_the_log_never_takes_is_a_line_that_names_the_event(caplog):
    publisher, answer = Refusing(lambda out: True), Named()
    await asyncio.wait_for(_deliver(publisher, answer, EVENT, await answer(EVENT)), 60)
    assert publisher.taken == []
    assert "No reward can be written for Place(topic='ns.events', partition=1, offset=7)" in caplog.text


def end_episodes(transactor: Transactor, topic: str, numbers: range, each: int = 50) -> None:
    """In transactions of `each` episodes."""
    for n in numbers:
        if n % each == 0:
            transactor.begin()
        episode = Episode(f"root-{n}")
        episode.start()
        transactor.send(_ended(topic, episode))
        if n % each == each - 1:
            transactor.commit({}, None)


def _ended(topic: str, episode: Episode) -> Outgoing:
    value = codec.encode("Event", episode.end())
    return Outgoing(topic, episode.key.encode(), value, {"kind": b"episode_ended"})


def judged(bus: KafkaBus, raw: str) -> set[str]:
    found = set()
    for partition in range(2):
        for record in bus.read(raw, partition):
            found.add(codec.decode_as("Event", record.value or b"")["trajectory"])
    return found


def wait(done, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.2)


def test_security_options_pass_through():
    assert credentials({}) is None
    sasl = credentials(
        {
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.username": "u",
            "sasl.password": "p",
        }
    )
    assert (sasl.protocol.value, sasl.mechanism.value, sasl.username) == ("SASL_PLAINTEXT", "SCRAM-SHA-512", "u")
    tls = credentials({"security.protocol": "ssl"})
    assert tls.context is not None
    with pytest.raises(ConfigError, match="cannot honour"):
        credentials({"security.protocol": "sasl_ssl", "sasl.kerberos.keytab": "x"})


offsets = st.lists(st.integers(0, 1_000), unique=True, min_size=1).map(sorted)


@given(offsets, st.data())
def test_the_mark_passes_holes_and_never_an_unanswered_event(log, data):
    answered: AnswerMarks[str] = AnswerMarks()
    given_out: list[int] = []
    done: set[int] = set()
    for offset in log:
        answered.deliver("p", offset)
        given_out.append(offset)
        for ready in data.draw(st.sets(st.sampled_from(given_out))) - done:
            answered.answer("p", ready)
            done.add(ready)
        waiting = [offset for offset in given_out if offset not in done]
        assert answered.mark("p") == (min(waiting) if waiting else given_out[-1] + 1)
    for offset in log:
        answered.answer("p", offset)
    assert answered.mark("p") == log[-1] + 1


def test_partitions_know_nothing_of_each_other_and_a_lost_one_is_forgotten():
    answered: AnswerMarks[int] = AnswerMarks()
    answered.deliver(0, 5)
    answered.deliver(1, 9)
    answered.answer(1, 9)
    assert (answered.mark(0), answered.mark(1), answered.mark(2)) == (5, 10, None)
    answered.forget([0, 2])
    answered.answer(0, 5)  # a late answer to what another reader has now
    assert answered.mark(0) is None


def test_what_is_delivered_again_waits_again():
    answered: AnswerMarks[int] = AnswerMarks()
    for offset in (3, 4):
        answered.deliver(0, offset)
        answered.answer(0, offset)
    answered.deliver(0, 3)
    assert answered.mark(0) == 3
