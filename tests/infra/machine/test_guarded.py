"""The local broker behind a login: who has its key works as before, mending included; who has none does nothing."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from millrace.infra.errors import AccessError, UnreachableError
from millrace.infra.local_keys import login
from millrace.infra.log.base import Outgoing, TopicSpec
from millrace.infra.log.kafka.bus import KafkaBus
from millrace.infra.machine.broker import Broker, answers
from tests.infra.log.test_kafka_mend import decide_and_kill

pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.timeout(900)]


def test_who_has_no_key_is_not_let_in_and_who_has_it_mends(tmp_path: Path) -> None:
    with Broker(tmp_path / "broker", password="open-sesame") as broker:
        broker.start()
        assert stat.S_IMODE(broker.properties.stat().st_mode) == 0o600
        assert not answers(broker.bootstrap, timeout_s=2)
        assert answers(broker.bootstrap, timeout_s=60, options=login("open-sesame"))
        with (
            KafkaBus(broker.bootstrap, login("wrong")) as stranger,
            pytest.raises((AccessError, UnreachableError), match=r"let us in|answers"),
        ):
            stranger.topics("")
        with KafkaBus(broker.bootstrap, login("open-sesame"), prefix="n.") as bus:
            bus.ensure_topics([TopicSpec("n.x", 3), TopicSpec("n.g", 1)])
            assert bus._mends()
            expected: list[bytes] = []
            for number, commits in enumerate([True, False, True]):
                with bus.transactor("n.t") as transactor:
                    assert [[r.value for r in bus.read("n.x", p)] for p in range(3)] == [expected] * 3
                    transactor.begin()
                    decide_and_kill(transactor, broker, number, expected, commits=commits)
            bus.transactor("n.t").close()
            assert [[r.value for r in bus.read("n.x", p)] for p in range(3)] == [expected] * 3
            with bus.member("n.group", "n.g") as member:
                while not member.assignment():
                    member.poll(1, 0.1)
                (row,) = bus.group("n.group").members
                assert bus.expel("n.group", row.member_id)


def test_a_broker_that_was_made_without_a_key_asks_for_it_from_its_next_start_on(tmp_path: Path) -> None:
    with Broker(tmp_path / "broker") as plain:
        plain.start()
        address = plain.bootstrap
        with KafkaBus(address) as bus:
            bus.ensure_topics([TopicSpec("kept", 1)])
            bus.publisher().publish(Outgoing("kept", b"k", b"v")).result(30)
    with Broker(tmp_path / "broker", password="open-sesame") as broker:
        broker.start()
        assert broker.bootstrap == address
        assert not answers(address, timeout_s=2)
        with KafkaBus(address, login("open-sesame")) as bus:
            assert [record.value for record in bus.read("kept", 0)] == [b"v"]


def test_a_topic_that_was_made_without_parts_is_altered_and_forgets_in_time(tmp_path: Path) -> None:
    with Broker(tmp_path / "broker", password="open-sesame") as broker:
        broker.start()
        with KafkaBus(broker.bootstrap, login("open-sesame")) as bus:
            before = {"cleanup.policy": "delete", "retention.ms": "3600000"}
            bus.ensure_topics([TopicSpec("n.raw", 1, before)])
            wanted = [TopicSpec("n.raw", 1, before | {"segment.ms": "150000"})]
            bus.ensure_topics(wanted)
            bus.check_topics(wanted)
            assert bus._existing_specs(wanted)["n.raw"].config["segment.ms"] == "150000"
