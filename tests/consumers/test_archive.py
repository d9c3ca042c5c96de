"""A history that only the archive still has is audited, explained and reported as if the topics had kept it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from typer.testing import CliRunner

from millrace.apps.cli.main import app
from millrace.consumers.audit import audit
from millrace.infra.config import load
from millrace.infra.connect import claims, history
from millrace.infra.log.archive.bus import ArchivedBus
from millrace.infra.log.base import Outgoing, Place, TopicSpec
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.history.kinds import TRAJECTORIES, topics_of
from millrace.infra.log.history.places import PlaceReader
from millrace.infra.log.kafka.bus import KafkaBus
from tests.consumers.archived import cut
from tests.support.history import History
from tests.support.history_log import NS
from tests.support.history_records import POLICY


def archived(made: History, root: Path, *, only: str = "") -> ArchivedBus:
    """The history with everything archived that may be, and every archived topic emptied. only: or one kind."""
    return cut(made.bus, NS, root, only=made.topic(only) if only else "")


@pytest.mark.parametrize("seed", range(3))
def test_the_audit_of_an_archive_is_that_of_the_topics(seed: int, tmp_path: Path) -> None:
    made = History(seed)
    before = audit(made.bus, NS, POLICY).as_json()
    both = archived(made, tmp_path)
    names = topics_of(NS, POLICY)
    assert not list(made.bus.read(names[TRAJECTORIES], 0)), "retention took what was archived"
    assert audit(both, NS, POLICY).as_json() == before


def test_trajectories_are_read_by_their_places(tmp_path: Path) -> None:
    made = History(0)
    topic = topics_of(NS, POLICY)[TRAJECTORIES]
    places = [record.place for p in range(made.bus.partitions(topic)) for record in made.bus.read(topic, p)]
    reader = PlaceReader(made.bus, ClaimStore("memory://n"))
    before = reader.trajectories(places)
    assert places
    both = archived(made, tmp_path)
    assert PlaceReader(both, ClaimStore("memory://n")).trajectories(places) == before


@pytest.mark.slow
@pytest.mark.kafka
def test_the_command(broker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real topics, real retention: what `archive once` kept is read after Kafka has deleted it."""
    monkeypatch.chdir(tmp_path)
    namespace = "a" + tmp_path.name.replace("_", "-")[-20:]
    topic = f"{namespace}.events"
    flags = ["--set", f"namespace={namespace}", "--set", f"kafka.bootstrap={broker}", "--set", "kafka.local=false"]
    flags += ["--set", "archive.segment_mb=1"]
    with KafkaBus(broker) as bus:
        bus.ensure_topics([TopicSpec(topic, 2), TopicSpec(f"{namespace}.raw", 1), TopicSpec(f"{namespace}.workers", 1)])
        with bus.transactor(f"{namespace}.t") as transactor:
            for n in range(300):
                transactor.begin()
                transactor.send(Outgoing(topic, b"%d" % n, b"%05d" % n * 2000, {"h": b"%d" % n}))
                transactor.commit({}, None)
        with bus.publisher() as publisher:
            publisher.publish(Outgoing(f"{namespace}.raw", b"k", b"restricted")).result(60)
        before = {p: list(bus.read(topic, p)) for p in (0, 1)}
        said = millrace(*flags, "archive", "once")
        assert "300 records" in said
        assert "4 segments" in said, "two of a MB each, and the rest of both partitions"
        assert "0 segments" in millrace(*flags, "archive", "once")
        ends = bus.ends(topic)
        admin = AdminClient({"bootstrap.servers": broker})
        for done in admin.delete_records([TopicPartition(topic, p, end) for p, end in ends.items()]).values():
            done.result(60)
        assert all(not list(bus.read(topic, p)) for p in (0, 1))
    settings = load(None, dict(pair.split("=", 1) for pair in flags if "=" in pair))
    with history(settings) as both:
        assert {p: list(both.read(topic, p)) for p in (0, 1)} == before
        wanted = before[1][0].place
        assert both.fetch([wanted, Place(topic, 0, 10**6)]) == [before[1][0], None]
    assert claims(settings) is not None
    listed = json.loads(millrace(*flags, "archive", "list", "--json"))
    assert {row["topic"] for row in listed} == {topic}, "neither raw nor what is compacted"
    assert topic in millrace(*flags, "archive", "list")
    assert "whole: 300 records" in millrace(*flags, "archive", "verify")
    segment = sorted(Path(settings.archive_root).rglob("*.parquet"))[0]
    stored = bytearray(segment.read_bytes())
    stored[len(stored) // 2] ^= 1
    segment.write_bytes(stored)
    assert "damaged" in millrace(*flags, "archive", "verify", code=1)


def millrace(*words: str, code: int = 0) -> str:
    """What a command prints."""
    done = CliRunner().invoke(app, words)
    assert done.exit_code == code, done.output
    return done.output
