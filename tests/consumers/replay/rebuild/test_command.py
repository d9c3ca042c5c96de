"""`millrace replay rebuild` from outside: what it says, what it writes, how it ends."""

from __future__ import annotations

import json
import shlex
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient
from typer.testing import CliRunner

from millrace.apps.cli.main import app
from millrace.consumers.replay.rebuild import command
from millrace.consumers.replay.rebuild.law import WRITERS
from millrace.infra.log.archive.archive import Archive
from millrace.infra.log.base import Bus, Outgoing, TopicSpec
from millrace.infra.log.kafka.bus import KafkaBus
from millrace.testing.world import NAMESPACE
from tests.support.documents import REBUILD, RUN_BY, blocks
from tests.support.documents import ROOT as PAGES
from tests.support.players import POLICY
from tests.support.whole import Whole, whole

COMMANDS = [
    line for block in blocks(PAGES / "docs" / "replay.md") for line in block.commands if "replay rebuild" in line
]


@pytest.fixture(scope="module")
def history() -> Whole:
    return whole(2)


@pytest.fixture(autouse=True)
def _there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {"NAMESPACE": NAMESPACE, "POLICY__NAME": POLICY}.items():
        monkeypatch.setenv(f"MILLRACE_{name}", value)


def millrace(*words: str, code: int = 0, **environment: str) -> str:
    done = CliRunner().invoke(app, ["replay", "rebuild", *words], env={"COLUMNS": "200", **environment})
    assert done.exit_code == code, done.output
    return done.output


def over(history: Whole, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command reads this history, and folds with what folded it."""
    makers = {role: lambda _, s=stage: s for role, stage in history.stages.items()}
    monkeypatch.setattr(command, "history", lambda settings: nullcontext(history.bus))
    monkeypatch.setattr(command, "production", lambda settings, held: makers)


@pytest.mark.parametrize("typed", COMMANDS)
def test_each_command_of_the_page(typed: str, history: Whole, monkeypatch: pytest.MonkeyPatch) -> None:
    assert RUN_BY[typed] == REBUILD
    over(history, monkeypatch)
    words = shlex.split(typed)[3:]
    said = millrace(*words)
    assert "equal: every record is what its turn gives" in said
    if "--out" in words:
        root = words[words.index("--out") + 1]
        assert Archive(root).topics() == [history.topic(words[0])]
        assert f"records -> {root}" in said


def test_the_page_has_both_commands() -> None:
    assert [command.count("--out") for command in COMMANDS] == [0, 1]


def test_a_difference_is_named_and_ends_it_with_one(history: Whole, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = history.copy()
    [record, *_] = copy.records("grants")
    log = copy.bus.logs[record.topic][record.partition]
    log.entries[record.offset] = None
    over(copy, monkeypatch)
    turn = record.headers["turn"].decode()
    said = millrace("grants", code=1)
    assert f"{record.topic} (turn {turn}): a Grant is missing" in said
    assert "not equal" in said
    told: dict[str, Any] = json.loads(millrace(f"{NAMESPACE}.{POLICY}.grants", "--json", code=1))
    assert told["equal"] is False
    assert told["topics"][record.topic]["missing"] == 1
    assert told["topics"][record.topic]["differences"] == [{"what": "a Grant is missing", "place": None, "turn": turn}]


def test_what_cannot_be_had_is_said(history: Whole, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = history.copy()
    copy.bus.delete_before(copy.topic("raw"), 0, 5)
    over(copy, monkeypatch)
    said = millrace(code=1)
    assert f"{copy.topic('events')} cannot be made again: {copy.topic('raw')}[0]: offsets 0 to 4 are neither" in said
    assert "not all could be compared" in said
    assert "what is left begins at 5" in CliRunner().invoke(app, ["replay", "rebuild", "events"]).stderr


def test_a_topic_that_no_stage_writes() -> None:
    done = CliRunner().invoke(app, ["replay", "rebuild", "raw"])
    assert done.exit_code == 1
    assert all(kind in done.stderr for kind in ("raw: no stage", *WRITERS))


# -- a real broker


def written_to(bus: Bus, history: Whole) -> None:
    """Every record at its own offset: holes are the ends of transactions, or aborted ones. The next transaction begins
    when the end of the last one is written."""
    topics = [name for name in history.bus.logs if "changelog" not in name]
    bus.ensure_topics([TopicSpec(name, history.bus.partitions(name)) for name in topics])
    with bus.publisher() as publisher, bus.transactor(f"{NAMESPACE}.copy") as transactor:
        transactor.begin()
        for name in topics:
            for partition in range(history.bus.partitions(name)):
                _copied(history, name, partition, publisher, transactor)
            for partition in range(history.bus.partitions(name)):
                lie = [(r.offset, r.key, r.value) for r in bus.read(name, partition)]
                assert lie == [(r.offset, r.key, r.value) for r in history.bus.read(name, partition)]


def _copied(history: Whole, name: str, partition: int, publisher: Any, transactor: Any) -> None:
    records = list(history.bus.read(name, partition))
    ends = [*(record.offset for record in records), history.bus.ends(name)[partition]]
    holes = [ends[0], *(after - at - 1 for at, after in pairwise(ends))]

    def aborted(size: int) -> None:
        if size:
            for _ in range(size - 1):
                transactor.send(Outgoing(name, b"", b"aborted", partition=partition))
            transactor.flush()
            transactor.abort()
            transactor.begin()

    aborted(holes[0])
    for record, hole in zip(records, holes[1:], strict=True):
        out = Outgoing(name, record.key, record.value, record.headers, partition)
        if hole == 1:
            publisher.flush()
            transactor.send(out)
            transactor.commit({}, None)
            transactor.begin()
        else:
            publisher.publish(out)
            if hole:
                publisher.flush()
                aborted(hole)
    publisher.flush()


@pytest.mark.slow
@pytest.mark.kafka
def test_a_topic_that_was_deleted_is_had_back_from_a_real_log(history: Whole, broker: str, tmp_path: Path) -> None:
    topic = history.topic("trajectories")
    where = {"MILLRACE_KAFKA__BOOTSTRAP": broker, "MILLRACE_KAFKA__LOCAL": "false"}
    with KafkaBus(broker) as bus:
        written_to(bus, history)
        said = json.loads(millrace("trajectories", "completions", "grants", "resolutions", "--json", **where))
        assert said["equal"]
        counted = {name: row["equal"] for name, row in said["topics"].items()}
        assert counted[topic] == len(list(history.records("trajectories")))
        admin = AdminClient({"bootstrap.servers": broker})
        for done in admin.delete_topics([topic]).values():
            done.result(60)
        assert "missing" in millrace("trajectories", "--out", "rebuilt", code=1, **where)
    archive = Archive("rebuilt")
    found = [r for p in archive.shelves(topic) for r in archive.records(topic, p, 0, 1 << 40)]
    lost = list(history.records("trajectories"))
    assert sorted((r.partition, r.key, r.value) for r in found) == sorted((r.partition, r.key, r.value) for r in lost)
    named = {tuple(place.values()) for _, row in history.rows("completions") for place in row["trajectories"]}
    kept = {(r.place, r.value) for r in lost if tuple(r.place) in named}
    assert kept
    assert kept <= {(r.place, r.value) for r in found}
    listed = json.loads(
        CliRunner().invoke(app, ["--set", "archive.root=rebuilt", "archive", "list", "--json"], env=where).output
    )
    assert {row["topic"] for row in listed} == {topic}
