"""`trajectory`, `lineage` and `export` over a real broker: the same as over the world in memory that it copies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from millrace.apps.cli.main import app
from millrace.consumers.tell.command import account_of, lineage_in
from millrace.consumers.tell.topics import PolicyTopics
from millrace.formats.exports import export_from
from millrace.formats.exports.select import Selection
from millrace.infra.log.base import Outgoing, Place
from millrace.infra.log.history.reader import History
from millrace.infra.log.history.rows import as_stored
from millrace.infra.log.kafka.bus import KafkaBus
from millrace.infra.log.topics import TopicSizes
from millrace.schemas import codec
from tests.support.conversations import Conversations
from tests.support.history_log import NS, SHARDS, SLOTS
from tests.support.history_records import POLICY

pytestmark = [pytest.mark.slow, pytest.mark.kafka]

HERE = "reading"
KINDS = ("raw", "events", "grants", "trajectories", "evaluations", "completions", "resolutions", "weights", "ledger")
POINTS = ("events", "trajectories")
"""fields of places"""
WORLD = Conversations(5)


@pytest.fixture(scope="module", autouse=True)
def copied(broker: str) -> Iterator[None]:
    """The world, record by record, every place that one names moved along."""
    moved: dict[Place, Place] = {}

    def there(place: dict[str, Any]) -> dict[str, Any]:
        return moved[Place(**place)]._asdict()

    with KafkaBus(broker) as bus:
        bus.ensure_topics(TopicSizes(HERE, POLICY, SLOTS, SHARDS).specs())
        with bus.publisher() as publisher:
            for kind in KINDS:
                for record, row in WORLD.rows(kind):
                    found = dict(row)
                    for field in POINTS:
                        if field in found:
                            found[field] = [there(place) for place in found[field]]
                    if kind == "ledger":
                        named = [
                            {**group, "trajectories": [there(place) for place in group["trajectories"]]}
                            for group in found["groups"]
                        ]
                        found["groups"] = named
                    if kind == "events":
                        found["source_place"] = there(found["source_place"])
                    value = codec.encode(codec.name_of(record.value or b""), found)
                    topic = record.topic.replace(NS, HERE, 1)
                    out = Outgoing(topic, record.key, value, record.headers, record.partition)
                    moved[record.place] = publisher.publish(out).result()
        yield


@pytest.fixture(autouse=True)
def _settings(broker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    named = {"NAMESPACE": HERE, "POLICY__NAME": POLICY, "POLICY__TENANT": "local"}
    for name, value in {**named, "KAFKA__BOOTSTRAP": broker, "KAFKA__LOCAL": "false"}.items():
        monkeypatch.setenv(f"MILLRACE_{name}", value)


def typed(*words: str) -> str:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_an_export_is_the_same_from_kafka(tmp_path: Path) -> None:
    typed("export", "--layout", "jsonl", "-o", "kafka")
    export_from(History(WORLD.bus, NS, POLICY), "jsonl", tmp_path / "memory", Selection(), "local")
    rows = [sorted((tmp_path / name).read_bytes().splitlines()) for name in ("kafka", "memory")]
    assert rows[0] == rows[1]
    assert len(rows[0]) > 10
    assert any(orjson.loads(row)["trained_version"] for row in rows[0])


def test_a_lineage_is_the_same_from_kafka() -> None:
    _, sample = WORLD.rows("trajectories")[4]
    for wanted in ("3", sample["id"], sample["task_id"]):
        expected = lineage_in(PolicyTopics(WORLD.bus, NS, POLICY), wanted).json
        assert json.loads(typed("lineage", wanted, "--json")) == json.loads(json.dumps(expected))


def test_a_trajectory_is_the_same_from_kafka() -> None:
    _, sample = WORLD.rows("trajectories")[4]
    expected = account_of(PolicyTopics(WORLD.bus, NS, POLICY, as_stored), sample["id"]).as_json()
    found = json.loads(typed("trajectory", sample["id"], "--json"))
    assert found["lineages"] == json.loads(json.dumps(expected["lineages"]))
    assert found["verdict"] == expected["verdict"]
    said = [[turn["said"] for turn in branch["turns"]] for branch in found["branches"]]
    assert said == json.loads(json.dumps([[t["said"] for t in branch["turns"]] for branch in expected["branches"]]))
    place = found["branches"][0]["turns"][1]["place"]
    assert json.loads(typed("trajectory", place, "--json"))["id"] == sample["id"]
    assert sample["id"] in typed("trajectory", sample["attempt"])
