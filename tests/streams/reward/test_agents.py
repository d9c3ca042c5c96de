"""faust, at least once: killed in the middle, nothing that was not answered counts as done."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infra.bus.base import Outgoing, TopicSpec, Transactor
from infra.bus.kafka import KafkaBus
from infra.errors import ConfigError
from schemas import codec
from schemas.ids import new_id
from streams.reward.agents import credentials
from tests.support.events import Episode

ROOT = Path(__file__).parents[3]
COUNT = 600
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
                process.wait(30)
                process = start(*arguments)
            wait(lambda: judged(bus, raw) == targets, 120)
        finally:
            process.kill()
            process.wait()
            transactor.close()


def end_episodes(transactor: Transactor, topic: str, numbers: range) -> None:
    """In several transactions."""
    for n in numbers:
        if n % 50 == 0:
            transactor.begin()
        episode = Episode(f"root-{n}")
        episode.start()
        transactor.send(_ended(topic, episode))
        if n % 50 == 49:
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


def wait(done, seconds: float = 60) -> None:
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
